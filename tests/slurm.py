"""A Slurm of two nodes on this machine: its real daemons, in a folder and on ports of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers import free_port

_SECONDS = 150  # until the daemons answer

_CONFIGURATION = """
ClusterName=one
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
CompleteWait=60
MessageTimeout=90
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=4 State=UNKNOWN
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which ``srun``, ``sbatch`` and ``salloc`` find a Slurm that runs in ``folder``.

    The first node has this host's name, the second's has ``-b`` behind it. Each has four processors, whatever
    this machine has: Slurm counts them, and binds nothing to them. No job begins while another one is ending
    (CompleteWait): it could get the second node alone, whose name nobody resolves.
    """
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=host,
            folder=folder,
            user=pwd.getpwuid(os.getuid()).pw_name,
            controller_port=free_port(),
            # Another cluster may run here, and the port of a job is that of its number.
            first_job=os.getpid() % 100 * 100 + 1,
            first_port=free_port(),
            second_port=free_port(),
        ),
        encoding="ascii",
    )
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    environ = {**os.environ, "SLURM_CONF": str(configuration)}
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    with ExitStack() as stack:
        stack.enter_context(_daemon(munged, folder / "munged.out", environ))
        _wait_for(["munge", "-n", f"--socket={folder}/munge.socket"], environ, folder)
        stack.enter_context(_daemon(["slurmctld", "-D", "-i"], folder / "slurmctld.out", environ))
        for node in (host, f"{host}-b"):
            stack.enter_context(_daemon(["slurmd", "-D", "-N", node], folder / f"{node}.out", environ))
        _wait_for(["sinfo", "--noheader", "--states=idle", "--format=%D"], environ, folder, "2")
        yield {"SLURM_CONF": str(configuration)}


@contextmanager
def _daemon(command: list[str], log: Path, environ: dict[str, str]) -> Iterator[None]:
    """The daemon, which stays in the foreground and so is a child of ours, ended by its pid."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [_found(command[0]), *command[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _found(name: str) -> str:
    """Where a daemon lies: in a folder for administrators, which not every shell looks into."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or name


def _wait_for(command: list[str], environ: dict[str, str], folder: Path, answer: str = "") -> None:
    deadline = time.monotonic() + _SECONDS
    while True:
        ended = subprocess.run(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
        )
        if ended.returncode == 0 and answer in ended.stdout:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()}" for path in folder.glob("*.out"))
            raise RuntimeError(f"{command[0]} does not answer {answer!r}: {ended.stdout}\n{logs}")
        time.sleep(0.1)
