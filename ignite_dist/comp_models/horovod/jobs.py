"""Starts Horovod's workers on this machine, or on several machines through ``horovod.run``."""

from __future__ import annotations

import inspect
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from ignite_dist.environments.rendezvous import network_interfaces, stores
from ignite_dist.errors import RankFailedError, without_link
from ignite_dist.values import serialization
from ignite_dist.workers.failures import FailedRank, Failure, error_of, outcome_of
from ignite_dist.workers.sent_calls import EncodedCall, encode_for_machines
from ignite_dist.workers.supervisor import processes

# --- on this machine -----------------------------------------------------------------------------------


def start_local_workers(
    entry: Callable[..., Any],
    nproc_per_node: int,
    start_method: str | None,
    daemon: bool,
    prefix_output: bool = False,
) -> processes.Workers:
    """Start workers on this machine, with the environment variables that ``horovodrun`` would set.

    Unlike ``horovod.run``, this function takes less than a second, and the error shows the root cause.
    Horovod's rendezvous server checks no credentials, so it listens on loopback only.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    slots = get_host_assignments(parse_hosts(f"localhost:{nproc_per_node}"), nproc_per_node)
    server = _Rendezvous(slots)
    interface = network_interfaces.loopback_interface() or ""
    shared = create_run_env_vars("127.0.0.1", [interface], server.port)
    store, names_store = stores.serve_launchers_store()
    environs = [
        {
            "RANK": str(slot.rank),
            "WORLD_SIZE": str(slot.size),
            "LOCAL_RANK": str(slot.local_rank),
            "LOCAL_WORLD_SIZE": str(slot.local_size),
            **names_store,
            **{name: str(value) for name, value in {**shared, **create_slot_env_vars(slot)}.items()},
        }
        for slot in slots
    ]
    try:
        return processes.start(
            entry,
            {},
            environs,
            store=(server, store),
            start_method=start_method,
            daemon=daemon,
            prefix_output=prefix_output,
        )
    finally:
        del server, store  # the traceback of an exception would keep both alive


class _Rendezvous:
    """Horovod's rendezvous server on the loopback interface. The server stops when this object is deleted."""

    def __init__(self, slots: Any) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, verbose=0)
        self._server.init(slots)
        self._server.finished_list = _Finished(self._server.scope_size)
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="Horovod's rendezvous", daemon=True
        ).start()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the server thread no longer runs, and shutdown() would hang
            self._server.shutdown()
            self._server.server_close()


class _Finished(defaultdict[str, list[str]]):
    """The ranks that have finished the rendezvous, by scope.

    When all ranks of a scope have finished, Horovod clears the lists of all scopes. Other scopes would keep
    old addresses, and a new ``hvd.init()`` might look for a dead peer. So ``clear`` drops finished scopes.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(list)
        self._sizes = sizes

    def clear(self) -> None:
        for scope in [scope for scope, ranks in self.items() if len(ranks) == self._sizes[scope]]:
            del self[scope]


# --- through horovod.run -------------------------------------------------------------------------------

# A failed worker writes this report to its standard error, which Horovod's launcher saves in a file. The
# leading newline ends an unfinished line, for example of a progress bar. The token identifies the launch.
_REPORT = (
    "\nRank {rank} (local rank {local_rank}, pid {pid} on {host}) failed at {time:.6f} with {error_type} "
    "(exit code {exit_code}{consequence}{permanent}) in launch {token}. Its traceback:\n"
    "{traceback}End of the traceback of {token}.\n"
)
_REPORTED = (
    r"^Rank (?P<rank>\d+) \(local rank (?P<local_rank>\d+), pid (?P<pid>\d+) on (?P<host>[^\n]+?)\) "
    r"failed at (?P<time>[\d.]+) with (?P<error_type>\S+) "
    r"\(exit code (?P<exit_code>\w+)(?P<consequence>, a consequence)?(?P<permanent>, permanent)?\) "
    r"in launch {token}\. "
    r"Its traceback:\n(?P<traceback>.*?)^End of the traceback of {token}\.$"
)
_PREFIX = re.compile(r"^(.{24})?\[\d+\]<stderr>:", re.MULTILINE)  # (.{24})? is a timestamp


def run_keywords() -> set[str]:
    """The options of ``horovod.run``, without the options that ``spawn`` sets."""
    try:
        from horovod.runner import run
    except ImportError:
        return set()
    return set(inspect.signature(run).parameters) - {"func", "args", "kwargs", "num_proc", "np"}


def check_hosts(
    nproc_per_node: int, nnodes: int | None, hosts: str | None, run_options: Mapping[str, Any]
) -> None:
    """Check the hosts of a launch.

    Raises:
        ValueError: ``hosts`` is malformed, has too few slots, or is missing for several nodes.
    """
    if hosts is None:
        if (nnodes or 1) > 1 and not {"hostfile", "host_discovery_script"} & set(run_options):
            raise ValueError(
                f"nnodes={nnodes} needs hosts, a string of host names and numbers of processes such as "
                f"'node1:{nproc_per_node},node2:{nproc_per_node}'."
            )
        return
    found = re.findall(r"(?:^|,)\s*[^\s,:]+:(\d+)\s*(?=,|$)", hosts) if isinstance(hosts, str) else []
    slots = [int(number) for number in found]
    if not slots or len(slots) != hosts.count(",") + 1:
        raise ValueError(f"hosts is a string such as 'node1:2,node2:2', got {hosts!r}.")
    num_proc = nproc_per_node * (nnodes or len(slots))
    if num_proc > sum(slots):
        raise ValueError(
            f"hosts={hosts!r} has {sum(slots)} slots for {num_proc} processes "
            f"({nproc_per_node} on each of {nnodes or len(slots)} nodes)."
        )


def run_on_hosts(
    entry: Callable[..., Any],
    nproc_per_node: int,
    nnodes: int | None,
    hosts: str | None,
    run_options: Mapping[str, Any],
) -> list[Any]:
    """Run ``entry(local_rank)`` through ``horovod.run``. Return the results of the workers on this host.

    Raises:
        RankFailedError: a worker failed. The error contains the worker's traceback if the worker wrote it.
    """
    from horovod.runner import run
    from horovod.runner.util.network import filter_local_addresses

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("horovod.run() sets signal handlers: call it in the main thread.")
    num_nodes = nnodes or (hosts.count(",") + 1 if hosts else 1)
    num_proc = nproc_per_node * num_nodes
    if num_proc == 1 and hosts is not None and not filter_local_addresses([hosts.partition(":")[0]]):
        return list(start_local_workers(entry, 1, start_method=None, daemon=False).join() or [])
    token = secrets.token_hex(8)
    call = partial(_run_and_report, encode_for_machines(entry), list(sys.path), token)
    options = {"hosts": hosts, **run_options}
    with tempfile.TemporaryDirectory() as folder, _restore_signals():
        if num_proc > 1:  # Horovod computes a logarithm of num_proc - 1
            options.setdefault("output_filename", folder)
        try:
            outcomes = run(call, num_proc=num_proc, **options)
        except RuntimeError as error:
            raise _error(error, options.get("output_filename"), token) from None
    this_host = socket.gethostname()
    return [serialization.decode(result) for host, result in outcomes if host == this_host]


def _run_and_report(entry: EncodedCall, path: list[str], token: str) -> tuple[str, bytes]:
    """Run ``entry`` in a worker. Return the host name and the encoded result."""
    from horovod.runner.common.util.env import get_env_rank_and_size

    sys.path.extend(folder for folder in path if folder not in sys.path)  # for modules in the script's folder
    names = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local_rank = next(int(os.environ[name]) for name in names if name in os.environ)
    host = socket.gethostname()
    outcome = outcome_of(entry, local_rank)
    if not isinstance(outcome, Failure):
        return host, bytes(outcome)
    if outcome.is_exit_0:
        return host, bytes(serialization.encode(None))
    rank, _ = get_env_rank_and_size()
    place = {"rank": rank, "local_rank": local_rank, "pid": os.getpid(), "host": host, "token": token}
    place["consequence"] = ", a consequence" if outcome.is_consequence else ""
    place["permanent"] = ", permanent" if outcome.is_permanent else ""
    sys.stderr.write(_REPORT.format(**place, **vars(outcome)))
    sys.stderr.flush()
    raise SystemExit(outcome.exit_code or 1)


def _error(error: RuntimeError, folder: str | None, token: str) -> RankFailedError | RuntimeError:
    """Make the error of a failed job from the workers' reports and from Horovod's error."""
    files = sorted(Path(folder).rglob("stderr")) if folder else []
    written = "\n".join(_PREFIX.sub("", file.read_text(errors="replace")) for file in files)
    reported = re.compile(_REPORTED.replace("{token}", token), re.MULTILINE | re.DOTALL)
    failed = [_parse_report(**report.groupdict()) for report in reported.finditer(written)]
    ended = re.search(r"Process name: (\d+)\s+Exit code: (-?\d+)", str(error))
    if ended is not None:
        rank, code = map(int, ended.groups())
        code = 128 - code if code - 128 in set(signal.Signals) else code  # shells add 128 to a signal
        if rank not in {one.rank for one in failed}:
            # This rank wrote no report. After a failure, Horovod ends the other workers by SIGTERM.
            ended_by = Failure(inf, "", "", "", code, is_consequence=code == -signal.SIGTERM)
            failed.append(FailedRank(rank, rank, 0, "", ended_by))
    return error_of(failed) if failed else error


def _parse_report(
    rank: str,
    local_rank: str,
    pid: str,
    host: str,
    time: str,
    error_type: str,
    exit_code: str,
    consequence: str | None,
    permanent: str | None,
    traceback: str,
) -> FailedRank:
    summary = without_link(traceback).strip().rpartition("\n")[2]
    code = int(exit_code) if exit_code != "None" else None
    when = float(time)
    failure = Failure(when, error_type, summary, traceback, code, bool(consequence), bool(permanent))
    return FailedRank(int(rank), int(local_rank), int(pid), host, failure)


@contextmanager
def _restore_signals() -> Iterator[None]:
    """Restore the signal handlers that ``horovod.run`` replaces, and turn Ctrl-C into KeyboardInterrupt.

    An error after SIGTERM is permanent: there is no restart. Horovod then ends all workers by SIGTERM, and
    raises that their results are missing if none of them had failed before.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous_fd = signal.set_wakeup_fd(writer)  # Python writes each signal's number into the pipe
    try:
        yield
    except RuntimeError as error:
        received = b""
        with suppress(BlockingIOError):
            received = os.read(reader, 1024)
        if signal.SIGINT in received:
            raise KeyboardInterrupt from None
        if isinstance(error, RankFailedError):
            error.is_permanent = error.is_permanent or signal.SIGTERM in received
        elif signal.SIGTERM in received:
            ended = Failure(inf, "", "", "", -signal.SIGTERM, is_permanent=True)
            raise error_of([FailedRank(0, 0, 0, "", ended)]) from None
        raise
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in handlers.items():
            if handler is not None:  # None: the handler is in C, and Python cannot restore it
                signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
