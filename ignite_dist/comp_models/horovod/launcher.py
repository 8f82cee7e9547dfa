"""Horovod's launcher. It starts workers on this machine, or on several machines with ``horovod.run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ignite_dist.comp_models.launcher import Launcher
from ignite_dist.internals.arguments import check_counts


class HorovodLauncher(Launcher):
    """Starts workers with the environment variables that Horovod reads."""

    restarts_several_nodes = True  # one launcher starts the workers of all nodes

    @classmethod
    def options(cls) -> set[str]:
        from ignite_dist.comp_models.horovod import jobs

        return super().options() | jobs.run_keywords()

    @classmethod
    def check(
        cls,
        *,
        nproc_per_node: int,
        nnodes: int | None = None,
        hosts: str | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
        prefix_output: bool = False,
        **run_options: Any,
    ) -> None:
        from ignite_dist.comp_models.horovod import jobs

        check_counts(nproc_per_node=nproc_per_node, nnodes=1 if nnodes is None else nnodes)
        jobs.check_hosts(nproc_per_node, nnodes, hosts, run_options)
        if (hosts or run_options) and (start_method or daemon or prefix_output or not join):
            raise ValueError(
                "start_method, daemon, prefix_output and join=False are for workers on this machine, but "
                f"{', '.join(['hosts'] * (hosts is not None) + list(run_options))} needs horovod.run, "
                "which has no such options."
            )

    @classmethod
    def start(
        cls,
        entry: Callable[..., Any],
        *,
        backend: str,
        nproc_per_node: int,
        nnodes: int | None = None,
        hosts: str | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
        prefix_output: bool = False,
        **run_options: Any,
    ) -> Any:
        """See ``idist.spawn``. ``hosts`` and ``run_options`` are passed to ``horovod.run``."""
        from ignite_dist.comp_models.horovod import jobs

        cls.check(
            nproc_per_node=nproc_per_node,
            nnodes=nnodes,
            hosts=hosts,
            start_method=start_method,
            join=join,
            daemon=daemon,
            prefix_output=prefix_output,
            **run_options,
        )
        if hosts is not None or run_options:
            return jobs.run_on_hosts(entry, nproc_per_node, nnodes, hosts, run_options)
        workers = jobs.start_local_workers(entry, nproc_per_node, start_method, daemon, prefix_output)
        return workers.join() if join else workers
