"""Starts workers for torch.distributed on this node, alone or together with other nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import default_pg_timeout

from ignite_dist.comp_models.launcher import Launcher
from ignite_dist.environments import devices, spawned
from ignite_dist.environments.rendezvous import stores
from ignite_dist.internals.arguments import check_nodes, check_timeout

if TYPE_CHECKING:
    from ignite_dist.workers.supervisor.attempts import Attempts
    from ignite_dist.workers.supervisor.node_links import Hello
    from ignite_dist.workers.supervisor.nodes import Nodes


class NativeLauncher(Launcher):
    """Starts workers that rendezvous over a store. The launcher of node 0 serves the store."""

    restarts_several_nodes = True

    @classmethod
    def check(
        cls,
        *,
        nproc_per_node: int,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_nodes(nproc_per_node, nnodes, node_rank, master_addr, master_port, init_method)

    @classmethod
    def start(  # type: ignore[override]  # each backend has its own keywords
        cls,
        entry: Callable[..., Any],
        *,
        backend: str,
        nproc_per_node: int,
        nnodes: int = 1,
        node_rank: int = 0,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
        prefix_output: bool = False,
        attempts: Attempts | None = None,
    ) -> Any:
        """See ``idist.spawn``."""
        from ignite_dist.workers.supervisor import nodes, processes
        from ignite_dist.workers.supervisor.attempts import Attempts
        from ignite_dist.workers.supervisor.node_links import Hello

        check_nodes(nproc_per_node, nnodes, node_rank, master_addr, master_port, init_method)
        check_timeout("timeout", default_pg_timeout if timeout is None else timeout)
        devices.check_devices(backend, nproc_per_node)
        store, environ = None, stores.loopback_variables() if nnodes == 1 else {}
        job = nodes.assumed_nodes(node_rank, nnodes, nproc_per_node)
        if init_method in (None, "env://"):
            attempts = attempts or Attempts()
            settings = attempts.max_restarts, attempts.job_id
            hello = Hello(node_rank, nnodes, nproc_per_node, backend, socket.gethostname(), *settings)
            address = master_addr or "127.0.0.1", master_port or 0
            store, job, variables = _rendezvous(hello, *address, timeout or default_pg_timeout, attempts)
            environ.update(variables)
        elif attempts is not None and attempts.num_restarts:
            stores.remove_files(init_method)  # they have the addresses of ranks that have ended
        environ.update(spawned.mark({**os.environ, **environ}))  # with an init_method, MASTER_* is inherited
        workers = processes.start(
            entry,
            {"init_method": init_method, "timeout": timeout},
            [{**environ, **ranks} for ranks in job.environs()],
            store=store,
            start_method=start_method,
            daemon=daemon,
            nodes=job,
            prefix_output=prefix_output,
        )
        del store  # a traceback would keep it in a reference cycle, which a forked child must not collect
        return workers.join() if join else workers


def _rendezvous(
    hello: Hello, address: str, port: int, timeout: timedelta, attempts: Attempts
) -> tuple[Any, Nodes, dict[str, str]]:
    """Serve a store for one node, or wait for the launchers of all nodes, which stay connected for a restart.

    Returns:
        The store (None for several nodes), the nodes, and the workers' environment variables.
    """
    from ignite_dist.workers.supervisor import nodes
    from ignite_dist.workers.supervisor.attempts import JOB_ID_VARIABLE

    if hello.nnodes == 1:
        store, port = stores.serve_store(address, port)
        return store, nodes.assumed_nodes(0, 1, hello.nproc_per_node), stores.join_variables(address, port)
    job = attempts.nodes or nodes.meet(hello, address, port, timeout, stores.serve_store)
    attempts.nodes = job
    main = job.nodes[0]
    return None, job, {JOB_ID_VARIABLE: main.job_id, **stores.join_variables(main.address, job.port)}
