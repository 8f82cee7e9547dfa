"""Worlds to run a case in: one function, called on every rank of a context.

The workers of a world are started once and kept. If a case fails or hangs on any rank, the workers are ended
and the next case gets new ones.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import pytest

from ignite_dist import launcher
from ignite_dist.environments import is_launcher_variable
from ignite_dist.errors import DistributedError
from ignite_dist.testing.conformance import ranks
from ignite_dist.testing.conformance.cases import SECONDS_PER_CASE
from ignite_dist.testing.kept_workers import KeptWorkers

_DIED = "the worker died"
_END_SECONDS = 30.0  # from SIGTERM to the end of a launcher


class SerialWorld:
    """This process."""

    name, size = "serial", 1

    def run(self, case: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """The result of the case, in a list."""
        return [case(**kwargs)]

    def close(self) -> None:
        """Do nothing."""


class SpawnedWorld:
    """Workers of ``idist.spawn`` that wait for cases.

    Args:
        backend: a backend of ``idist.spawn``, or ``"module:backend"``: importing the module registers it.
        size: number of ranks.
    """

    def __init__(self, backend: str, size: int) -> None:
        self.name, self.size = f"{backend.rpartition(':')[2]}-{size}", size
        self._backend = backend
        self._kept: KeptWorkers | None = None

    def run(self, case: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """The result of the case on each rank.

        Fails the test if the case raised on a rank, or did not return in time.
        """
        if self._kept is None:
            self._kept = KeptWorkers(self._start, self.size)
        for connection in self._kept.connections.values():
            with suppress(OSError):  # the rank has ended, which _answers() finds
                connection.send((case.__module__, case.__name__, kwargs))
        answers = self._answers(self._kept)
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in sorted(answers.items()) if text]
        silent = sorted(set(range(self.size)) - set(answers))
        if silent:
            failures.append(f"no answer within {SECONDS_PER_CASE} s from ranks {silent}")
            one_of_each = {self._kept.pids[rank]: rank for rank in silent}  # replicas of XLA share a process
            for pid, rank in one_of_each.items():
                with suppress(ProcessLookupError):  # it has ended since
                    failures.append(f"stacks of process {pid}:\n{self._kept.stacks(rank)}")
        if any(text == _DIED for text, _ in answers.values()):
            failures.append(self._kept.failure())
        if failures:
            self.close()
            pytest.fail("\n".join(failures), pytrace=False)
        return [answers[rank][1] for rank in range(self.size)]

    def _start(self, address: str) -> Any:
        """Start ranks that call :func:`ranks.serve`."""
        module, _, backend = self._backend.rpartition(":")
        args = (address, ranks.Import(module)) if module else (address,)
        return launcher.spawn(backend, ranks.serve, args, nproc_per_node=self.size, join=False)

    def _answers(self, kept: KeptWorkers) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        waiting: dict[Any, int] = {connection: rank for rank, connection in kept.connections.items()}
        while waiting and (ready := wait(list(waiting), SECONDS_PER_CASE)):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = kept.connections[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = (_DIED, None)
        return answers

    def close(self) -> None:
        """End the workers."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()


class LaunchedWorld(SpawnedWorld):
    """Ranks that a launcher's command starts on this machine.

    Args:
        backend: as for :class:`SpawnedWorld`.
        size: number of ranks.
        command: of the launcher, with ``{ranks}`` for the number: ``"mpirun -np {ranks}"``.
    """

    def __init__(self, backend: str, size: int, command: str) -> None:
        super().__init__(backend, size)
        self._command = command

    def _start(self, address: str) -> _Launched:
        command = [*shlex.split(self._command.replace("{ranks}", str(self.size))), sys.executable]
        environ = {name: value for name, value in os.environ.items() if not is_launcher_variable(name)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        return _Launched([*command, "-m", ranks.__name__, self._backend, address], environ)


class _Launched:
    """A launcher's process."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the launcher.

        Raises:
            DistributedError: it has ended.
        """
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout)
            raise DistributedError(f"The launcher has ended with {code}: {shlex.join(self._command)}")

    def terminate(self) -> None:
        """End the launcher, which ends the ranks."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
