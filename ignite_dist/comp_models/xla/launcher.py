"""Starts replicas on this host, after a check that each replica gets a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ignite_dist.comp_models.launcher import Launcher
from ignite_dist.comp_models.xla import _torch_xla, replicas
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.internals.arguments import check_counts


class XlaLauncher(Launcher):
    """Starts one process per chip, or per several chips, with one thread per replica."""

    @classmethod
    def check(cls, *, nproc_per_node: int, nnodes: int | None = None, **kwargs: Any) -> None:
        check_counts(nproc_per_node=nproc_per_node, nnodes=1 if nnodes is None else nnodes)
        check_pjrt_device()
        if _torch_xla.is_runtime_initialized():
            raise RuntimeError(
                "This process has used an XLA device, and only one process at a time can use a host's "
                "devices. Start the replicas before this process uses an XLA device, or from another process."
            )
        num_processes, num_replicas = replicas.num_processes_and_replicas()
        num_devices = num_processes * num_replicas
        if nproc_per_node in (1, num_devices):
            return
        device_type = os.environ["PJRT_DEVICE"]
        hint = f" Set CPU_NUM_DEVICES={nproc_per_node}." if device_type == "CPU" else ""
        raise ValueError(
            f"nproc_per_node={nproc_per_node}, but this host has {num_devices} XLA device(s) "
            f"(PJRT_DEVICE={device_type}), and PJRT runs one replica, or one replica per device.{hint}"
        )

    @classmethod
    def auto_nproc_per_node(cls) -> int:
        check_pjrt_device()
        num_processes, num_replicas = replicas.num_processes_and_replicas()
        return num_processes * num_replicas

    @classmethod
    def start(  # type: ignore[override]  # each backend has its own keywords
        cls,
        entry: Callable[..., Any],
        *,
        backend: str,
        nproc_per_node: int,
        nnodes: int | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
        prefix_output: bool = False,
    ) -> Any:
        """See ``idist.spawn``. Each host of a pod calls this method; PJRT finds the other hosts."""
        cls.check(nproc_per_node=nproc_per_node, nnodes=nnodes)
        workers = replicas.start(entry, nproc_per_node, start_method, daemon, prefix_output)
        return workers.join() if join else workers


def check_pjrt_device() -> None:
    """Raise if PJRT's device is missing, or if torch_xla would use the CPU without ``PJRT_DEVICE=CPU``."""
    if "PJRT_DEVICE" in os.environ:
        replicas.num_processes_and_replicas()
        return
    import torch_xla  # noqa: F401  # looks for a TPU or a plugin's device, and sets PJRT_DEVICE

    if os.environ.get("PJRT_DEVICE", "CPU") == "CPU":
        os.environ.pop("PJRT_DEVICE", None)
        raise EnvironmentVariablesError(
            "PJRT_DEVICE is not set, and torch_xla finds no TPU on this host. Set PJRT_DEVICE=CPU to run on "
            "the CPU (and CPU_NUM_DEVICES=2 for two replicas)."
        )
