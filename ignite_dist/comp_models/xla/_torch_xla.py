"""torch_xla's private names. No other file of the package uses one.

:class:`ignite_dist.internals.private_names.PrivateName` describes the fields. Functions import torch_xla when
they need it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ignite_dist.internals.private_names import PrivateName, missing

_LAST = "2.9"  # the last release, and the only one that the package supports
_IN_C = "torch_xla._XLAC"

_NAMES = (
    (
        f"{_IN_C}._xla_runtime_is_initialized",
        "Every public function that reads the state of the runtime initializes the runtime.",
        "none: after the import of torch_xla, each search for a context raises AttributeError",
    ),
    (
        f"{_IN_C}._xla_set_default_device",
        "No public function sets the device of a thread. The device decides which replica the thread runs.",
        "none: spawn and loaders raise AttributeError",
    ),
    (
        "torch_xla.runtime._init_world_size_ordinal",
        "torch_xla's own launcher calls this function in each thread. It sets what torch.compile reads.",
        "none: spawn and loaders raise AttributeError",
    ),
    (
        f"{_IN_C}._xla_sync_multi",
        "xm.unlazy() also waits for the result, and this package would hold a lock for that time.",
        "none: collectives of several replicas in a process raise AttributeError",
    ),
    (
        f"{_IN_C}._set_all_reduce_token",
        "Each collective depends on the previous one. No public function removes this dependency.",
        "none: collectives of several replicas in a process raise AttributeError",
    ),
    (
        "torch_xla.experimental.plugins._plugin_registry",
        "No public function lists the device types of plugins.",
        "none: devices other than the CPU are refused with AttributeError",
    ),
    *(
        (
            f"torch_xla._internal.{name}",
            "torch_xla.launch() starts processes and threads by itself and returns no results.",
            f"none: {feature} raises ImportError or AttributeError",
        )
        for name, feature in (
            ("pjrt.initialize_singleprocess", "spawn of one replica"),
            ("pjrt.initialize_multiprocess", "spawn"),
            ("tpu.num_available_chips", "spawn on TPUs"),
            ("tpu.num_local_processes", "spawn on TPUs"),
            ("tpu.num_logical_cores_per_chip", "spawn on TPUs"),
            ("neuron.num_local_processes", "spawn on Neuron devices"),
        )
    ),
    (
        "torch_xla._internal.pjrt._run_thread_per_device._thread_fn",
        "The function in which a thread of torch_xla's launcher runs a replica.",
        "replicas of torch_xla's own launcher do not count as running",
    ),
)
PRIVATE_NAMES = tuple(PrivateName(*fields, since=_LAST) for fields in _NAMES)


def check() -> list[PrivateName]:
    """The :data:`PRIVATE_NAMES` that the installed torch_xla lacks. Imports torch_xla."""
    return missing(PRIVATE_NAMES)


REPLICA_OF_TORCH_XLA = "_thread_fn"
"""The name of the function in which torch_xla's launcher runs a replica."""


def is_runtime_initialized() -> bool:
    """True if this process has asked for an XLA device. Imports nothing."""
    xlac = getattr(sys.modules.get("torch_xla"), "_XLAC", None)  # None while torch_xla is imported
    return xlac is not None and xlac._xla_runtime_is_initialized()


def use_device(device: Any) -> None:
    """Make the calling thread the replica of ``device``."""
    import torch_xla
    from torch_xla import runtime

    torch_xla._XLAC._xla_set_default_device(str(device))
    runtime._init_world_size_ordinal()


def begin_to_compute(tensor: Tensor) -> None:
    """Compile the graph that computes ``tensor`` and start the computation."""
    import torch_xla

    torch_xla._XLAC._xla_sync_multi([tensor], [], wait=False)


def forget_order_of_collectives(device: Any) -> None:
    """Make the next collective on ``device`` independent of earlier collectives."""
    import torch_xla

    torch_xla._XLAC._set_all_reduce_token(str(device), None)


# --- for the launcher --------------------------------------------------------------------------------


def device_types_of_plugins() -> list[str]:
    """The values of ``PJRT_DEVICE`` that plugins of torch_xla add."""
    from torch_xla.experimental import plugins

    return list(plugins._plugin_registry)


def initialize_alone() -> None:
    """Initialize the runtime for a world of one replica."""
    from torch_xla._internal import pjrt

    pjrt.initialize_singleprocess()


def initialize_process(local_rank: int, num_processes: int) -> None:
    """Initialize the runtime for one of several processes of this host."""
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, num_processes)


def num_tpu_chips() -> int:
    """Number of TPU chips of this host."""
    from torch_xla._internal import tpu

    return int(tpu.num_available_chips())


def num_tpu_processes() -> int:
    """Number of processes that share the TPU chips of this host."""
    from torch_xla._internal import tpu

    return int(tpu.num_local_processes())


def num_replicas_per_tpu_chip() -> int:
    """Number of XLA devices of one TPU chip."""
    from torch_xla._internal import tpu

    return int(tpu.num_logical_cores_per_chip())


def num_neuron_processes() -> int:
    """Number of processes that share the Neuron devices of this host."""
    from torch_xla._internal import neuron

    return int(neuron.num_local_processes())
