"""Machines for the tests: network namespaces of this one, with addresses and host names of their own.

As on many clusters, a host's own name is a loopback address in its ``/etc/hosts``, and every host has a
second interface with one and the same address (Docker's bridge): neither leads to another host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import end_of_processes, plain_environ, python_that_forks

needs_namespaces = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root and iproute2, for network namespaces",
)


def on_a_disk(folder: Path | str, options: str) -> tuple[str, ...]:
    """The beginning of a command that sees a disk of its own in ``folder``, with options of ``mount``."""
    mount = f'mount -t tmpfs -o {options} none {folder} && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mount, "sh")


@cache
def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder, suppress(OSError):
        command = [*on_a_disk(folder, "size=16k"), "true"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="may not mount a file system of its own")

_LINK = "eth0"


class Host(NamedTuple):
    """A machine, by the name that its own processes see.

    ``namespace`` is its name in ``ip netns``, and ``port`` that of its port of the bridge.
    """

    name: str
    address: str
    namespace: str
    port: str

    def start(self, *command: Any, **environ: str) -> Job:
        """Run a command on this machine; its output goes to a file.

        The machines share the memory of one, so shared memory is off, unless ``environ`` turns it on.
        """
        output = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the job
        in_namespace = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        process = subprocess.Popen(
            [*in_namespace, f'hostname {self.name} && exec "$@"', "sh", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plain_environ(
                **{"IGNITE_DIST_SILENCE_SECONDS": "15", "IGNITE_DIST_SHARED_MEMORY": "0", **environ}
            ),
        )
        return Job(self, process, output)

    def python(self, *arguments: Any, **environ: str) -> Job:
        """Run this interpreter on this machine: in a fork, as ``helpers.run_python`` does."""
        python = python_that_forks()
        return self.start(python, *arguments, **{"PYTHON_EXEC": python, **environ})

    def cut(self) -> None:
        """Cut its cable: nobody is told, what is sent is lost."""
        _ip("link", "set", self.port, "nomaster")

    def pids(self) -> list[int]:
        """The processes on this machine."""
        return list(map(int, _ip("netns", "pids", self.namespace).split()))


class Job(NamedTuple):
    """A command that runs on a machine."""

    host: Host
    process: subprocess.Popen[bytes]
    output: Any

    def text(self) -> str:
        """What it has written so far."""
        with open(f"/proc/self/fd/{self.output.fileno()}", encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait_for(self, text: str, seconds: float = 150) -> None:
        """Wait until it has written ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.text():
            assert self.process.poll() is None, f"{self.host.name} has ended: {self.text()}"
            assert time.monotonic() < deadline, f"no {text!r} on {self.host.name}: {self.text()}"
            time.sleep(0.05)

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Its exit code and all that it has written."""
        try:
            return self.process.wait(seconds), self.text()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} goes on after {seconds} s: {self.text()}") from None


@contextmanager
def machines(num_hosts: int, subnet: str = "10.98.7") -> Iterator[list[Host]]:
    """Hosts ``hosta``, ``hostb``, ... that reach each other; with them all that runs there ends.

    The address of the first is ``1`` in ``subnet``. No other process sees this network.
    """
    unique = f"idist{os.getpid()}"
    bridge = f"{unique}br"  # an interface's name has at most 15 characters
    hosts = [
        Host(f"host{letter}", f"{subnet}.{number}", f"{unique}{letter}", f"{unique}{letter}")
        for number, letter in enumerate("abcdef"[:num_hosts], start=1)
    ]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _add(host, hosts, bridge)
        yield hosts
    finally:
        for host in hosts:
            _remove(host)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True, timeout=30)


def _add(host: Host, hosts: list[Host], bridge: str) -> None:
    _ip("netns", "add", host.namespace)
    etc = Path("/etc/netns", host.namespace)
    etc.mkdir(parents=True)
    others = [f"{other.address} {other.name}" for other in hosts if other is not host]
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others]
    (etc / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
    _ip("link", "add", host.port, "type", "veth", "peer", "name", _LINK, "netns", host.namespace)
    _ip("link", "set", host.port, "master", bridge, "up")
    inside = ("-n", host.namespace)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "add", "docker0", "type", "bridge")
    for device, address in ((_LINK, f"{host.address}/24"), ("docker0", "172.17.0.1/16")):
        _ip(*inside, "addr", "add", address, "dev", device)
        _ip(*inside, "link", "set", device, "up")
    _ip(*inside, "route", "add", "default", "dev", _LINK)


def _remove(host: Host) -> None:
    """Take the host away, as far as it is there."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], check=False, capture_output=True, text=True, timeout=30
    )
    pids = list(map(int, listed.stdout.split()))
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)
    end_of_processes(pids, 10)
    for command in (("netns", "del", host.namespace), ("link", "del", host.port)):
        subprocess.run(["ip", *command], check=False, capture_output=True, timeout=30)
    shutil.rmtree(Path("/etc/netns", host.namespace), ignore_errors=True)


def _ip(*arguments: str) -> str:
    ended = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, f"ip {' '.join(arguments)}: {ended.stderr}"
    return ended.stdout
