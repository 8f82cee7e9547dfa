"""Processes for the tests: plain ranks as torchrun starts them, and scripts of their own."""

from __future__ import annotations

import faulthandler
import ipaddress
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

import warm_client
from ignite_dist.environments import is_launcher_variable
from ignite_dist.workers.supervisor import fork_server

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"


def plain_environ(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher sets; the package is found in this checkout."""
    environ = {name: value for name, value in os.environ.items() if not is_launcher_variable(name)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    return {**environ, **more}


def loopback() -> dict[str, str]:
    """gloo on the loopback interface: these ranks all run here, whatever this host's name resolves to."""
    names = [name for _, name in socket.if_nameindex()]
    return {"GLOO_SOCKET_IFNAME": next(name for name in ("lo", "lo0") if name in names)}


def free_port() -> int:
    """A port that was free a moment ago. For ranks that have to serve it themselves; else use port 0.

    None of those that port 0 stands for, which other tests may be given meanwhile.
    """
    while True:
        port = 25_000 + secrets.randbelow(7_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


# --- scripts -----------------------------------------------------------------------------------------


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def run_python(
    *args: Any,
    seconds: float = 280,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python *args`` in a fork of a Python that has imported torch; its output is text.

    If ``args`` start torchrun, its ranks are forks too. What is still running after ``seconds`` is ended.
    """
    command = [str(arg) for arg in args]
    env = plain_environ() if env is None else env
    if "torch.distributed.run" in command:
        env = {**env, "PYTHON_EXEC": python_that_forks()}
    can_run = warm_client.can_run(command)
    ended = warm_client.run(command, env, str(cwd or os.getcwd()), input, seconds) if can_run else None
    if ended is None:
        return run_new_python(*args, seconds=seconds, env=env, cwd=cwd, **({"input": input} if input else {}))
    ended.stdout = without_gloos(ended.stdout)
    return ended


def python_that_forks() -> str:
    """A ``python`` for :mod:`subprocess`: what it runs is a fork, as in :func:`run_python`."""
    warm_client.start_for(plain_environ())
    return str(warm_client.write_programs() / "python")


def run_new_python(
    *args: Any, seconds: float = 280, prefix: Sequence[str] = (), **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """``python *args``; its output is text. What is still running after ``seconds`` is ended.

    ``prefix`` begins the command: a launcher, for example.
    """
    kwargs.setdefault("env", plain_environ())
    if "input" not in kwargs:
        kwargs.setdefault("stdin", subprocess.DEVNULL)
    command = [*prefix, sys.executable, *map(str, args)]
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
        **kwargs,
    )
    ended.stdout = without_gloos(ended.stdout)
    return ended


def without_gloos(output: str) -> str:
    """``output`` without what the gloo of torch 2.9 writes there: to how many ranks it has connected.

    In pieces, ``"[Gloo] Rank " "2" " is connected to " "3" ...``, between which those of other ranks may
    come. So each of its words goes, wherever it is, and the number and the end of line that it still owes.
    """
    said = r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
    kept, numbers, ends = [], 0, 0
    for piece in re.findall(rf"{said}|.|\n", output):
        if len(piece) > 1:
            numbers += piece != " peer ranks. "
            ends += piece.startswith("Expected")
        elif numbers and piece.isdigit():  # of one digit: the tests have fewer than ten ranks
            numbers -= 1
        elif ends and piece == "\n":
            ends -= 1
        else:
            kept.append(piece)
    return "".join(kept)


# --- ranks, started as torchrun starts them ----------------------------------------------------------


class Ended(NamedTuple):
    """How a rank ended: its result, or the traceback of what it raised, and after how many seconds."""

    result: Any
    error: str
    seconds: float


def torchrun_environs(
    world_size: int, port: int, nproc_per_node: int | None = None, agent_store: bool = True
) -> list[dict[str, str]]:
    """What torchrun sets for each rank, on one node or on several."""
    nproc_per_node = nproc_per_node or world_size
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % nproc_per_node),
            "LOCAL_WORLD_SIZE": str(nproc_per_node),
            "GROUP_RANK": str(rank // nproc_per_node),
            "GROUP_WORLD_SIZE": str(world_size // nproc_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent_store else {}),
        }
        for rank in range(world_size)
    ]


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """``function(*args)`` in plain processes, as under torchrun: what it returned in each.

    Nothing of the package starts them, and none of them has a context. See :func:`end_of_ranks`.
    """
    ended = end_of_ranks(function, *args, world_size=world_size, **kwargs)
    failed = [f"rank {rank} raised:\n{one.error}" for rank, one in enumerate(ended) if one.error]
    assert not failed, "\n".join(failed)
    return [one.result for one in ended]


def end_of_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    environs: Sequence[Mapping[str, str]] | None = None,
    seconds: float = 120,
) -> list[Ended]:
    """How ``function(*args)`` ended in each of ``world_size`` plain processes.

    Args:
        function: of a module; it is run in fresh processes that have torch imported.
        args: can be pickled.
        world_size: number of processes.
        environs: what each has in its environment beside ours; torchrun's variables if not given.
        seconds: limit for all ranks. The error shows the stack of each rank that has not ended by then.
    """
    agent = None
    if environs is None:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environs = torchrun_environs(world_size, agent.port)
    context: Any = fork_server.context_of("forkserver")  # one server for all tests of this process
    receivers: list[Connection] = []
    processes: list[Any] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        traces = [Path(folder) / f"rank-{rank}" for rank in range(len(environs))]
        try:
            for environ, trace in zip(environs, traces, strict=True):
                receiver, sender = context.Pipe(duplex=False)
                complete = plain_environ(**{**loopback(), **environ})
                target = (function, args, complete, sender, trace, 0.8 * seconds)
                processes.append(context.Process(target=_rank, args=target, daemon=True))
                processes[-1].start()
                sender.close()
                receivers.append(receiver)
            return _collect(receivers, traces, started, seconds)
        finally:
            _end(processes)


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environ: dict[str, str],
    sender: Connection,
    trace: Path,
    seconds: float,
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.dump_traceback_later(seconds, file=trace.open("w", encoding="utf-8"))
    try:
        answer = (function(*args), "")
    except BaseException:
        answer = (None, traceback.format_exc())
    sender.send(answer)
    sender.close()
    os._exit(0)  # as after a crash: what the function has left open ends here and now


def _collect(receivers: list[Connection], traces: list[Path], started: float, seconds: float) -> list[Ended]:
    ended: dict[int, Ended] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), max(0.0, started + seconds - time.monotonic()))
        assert ready, "\n".join(
            [
                f"no end within {seconds} s of ranks {sorted(waiting.values())}; ended: {ended}",
                *(f"rank {rank}:\n{traces[rank].read_text()}" for rank in sorted(waiting.values())),
            ]
        )
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                result, error = receiver.recv()
            except EOFError:
                result, error = None, "it died without a word"
            ended[rank] = Ended(result, error, time.monotonic() - started)
    return [ended[rank] for rank in range(len(receivers))]


# --- what a process holds ----------------------------------------------------------------------------


def end_of_processes(pids: Sequence[int], seconds: float) -> list[int]:
    """The processes among ``pids`` that are still there after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    living = list(pids)
    while living := [pid for pid in living if _is_living(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return living


def listening(pids: Sequence[int]) -> set[str]:
    """The addresses on which the processes listen, as the kernel's tables of TCP sockets say."""
    inodes = {inode for pid in pids for inode in re.findall(r"socket:\[(\d+)\]", " ".join(open_files(pid)))}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = re.findall("." * 8, fields[1].partition(":")[0])
                packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
                found.add(socket.inet_ntop(family, packed))
    return found


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address."""
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def open_files(pid: int) -> list[str]:
    """What the file descriptors of a process are: paths, ``socket:[inode]``, ..."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, the one that reads this folder for example
            found.append(os.readlink(fd))
    return found


def _is_living(pid: int) -> bool:
    """Whether the process is there and not a zombie, which somebody else has to wait for."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
