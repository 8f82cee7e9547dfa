"""Worlds to run a case in: one function, called on every rank of a context of each computation model.

The workers of a world are started once and kept. A case that fails or hangs on any rank costs its world: the
workers are ended and the next case gets new ones.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.training import Training
from ignite_dist.comp_models.work import Completed, Steps
from ignite_dist.context.live import current_model
from table import PROPERTY

SECONDS_PER_CASE = 240


class CaseFailed(AssertionError):
    """A case failed on a rank; the text is that rank's traceback."""


class SerialWorld:
    """This very process."""

    name, size = "serial", 1

    def run(self, case: Callable[..., Any], **kwargs: Any) -> list[Any]:
        return [case(**kwargs)]

    def close(self) -> None:
        pass


class SpawnedWorld:
    """Workers of ``idist.spawn`` that wait for cases."""

    def __init__(self, backend: str, size: int) -> None:
        self.name, self.size = f"{backend}-{size}", size
        self._backend = backend
        self._connections: list[Connection] = []
        self._workers: Any = None

    def run(self, case: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """What ``case`` returned on each rank.

        Raises:
            CaseFailed: it raised on a rank, or did not return in time.
        """
        if self._workers is None:
            self._start()
        for connection in self._connections:
            connection.send((case.__module__, case.__name__, kwargs))
        answers = self._answers()
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in sorted(answers.items()) if text]
        silent = sorted(set(range(self.size)) - set(answers))
        if silent:
            failures.append(f"no answer within {SECONDS_PER_CASE} s from ranks {silent}")
        if failures:
            self.close()
            raise CaseFailed("\n" + "\n".join(failures))
        return [answers[rank][1] for rank in range(self.size)]

    def _start(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            Listener(str(Path(folder) / "cases"), "AF_UNIX") as listener,
        ):
            self._workers = self._launched(listener.address)
            accepted = [listener.accept() for _ in range(self.size)]
        by_rank = {connection.recv(): connection for connection in accepted}
        self._connections = [by_rank[rank] for rank in range(self.size)]

    def _launched(self, address: Any) -> Any:
        """Workers that run :func:`_serve`. ``terminate()`` ends them."""
        return idist.spawn(self._backend, _serve, (address,), nproc_per_node=self.size, join=False)

    def _answers(self) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        while waiting and (ready := wait(list(waiting), SECONDS_PER_CASE)):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = ("the worker died", None)
        return answers

    def close(self) -> None:
        """End the workers."""
        for connection in self._connections:
            connection.close()
        if self._workers is not None:
            self._workers.terminate()
        self._connections, self._workers = [], None


class XlaWorld(SpawnedWorld):
    """Replicas on PJRT's CPU, threads of one process."""

    def __init__(self, size: int) -> None:
        super().__init__("xla-tpu", size)
        self.name = f"xla-{size}"

    def _start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PJRT_DEVICE", "CPU")
            patch.setenv("CPU_NUM_DEVICES", str(self.size))
            super()._start()


class MpiWorld(SpawnedWorld):
    """Ranks that mpirun starts, with the backend of ``examples/mpi4py_backend.py``."""

    def __init__(self, size: int) -> None:
        super().__init__("mpi4py", size)

    def _launched(self, address: Any) -> Any:
        options = ["--allow-run-as-root", "--oversubscribe", "-np", str(self.size)]
        folders = [str(Path(__file__).parent), str(helpers.ROOT / "tests"), str(helpers.ROOT / "examples")]
        path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            ["mpirun.openmpi", *options, sys.executable, "-c", _MPI_RANK, address],
            env=helpers.plain_environ(PYTHONPATH=path),
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        workers = self._workers
        super().close()
        if workers is not None:
            workers.wait()


_MPI_RANK = """
import sys
import mpi4py_backend
import ignite_dist as idist
import worlds
idist.initialize("mpi4py")
idist.watch()  # for barrier(timeout=): the context has no store
worlds._serve(idist.get_local_rank(), sys.argv[1])
"""


def _serve(local_rank: int, address: str) -> None:
    with Client(address, "AF_UNIX") as connection:
        connection.send(idist.get_rank())
        idist.barrier()  # gloo's ranks decide whether they share memory in their first collective
        while True:
            try:
                module, name, kwargs = connection.recv()
            except EOFError:
                os._exit(0)  # the world was closed; its ranks owe each other nothing
            case = getattr(importlib.import_module(module), name).on_rank
            try:
                answer = ("", case(**kwargs))
            except BaseException:
                answer = (traceback.format_exc(), None)
            connection.send(answer)


def on_every_rank(case: Callable[..., Any]) -> Callable[..., Any]:
    """Make a test of ``case``: it runs on every rank of every world. Its parameters are the test's.

    What it returns goes into the conformance table, see :mod:`table`.
    """

    def test(world: Any, record_property: Callable[[str, Any], None], **kwargs: Any) -> None:
        backend, _, _ = world.name.rpartition("-")
        seen: dict[str, Any] = {"world": [backend or world.name, world.size], "cells": []}
        record_property(PROPERTY, seen)
        cells = world.run(case if world.size == 1 else test, **kwargs)
        assert all(one == cells[0] for one in cells), "ranks saw different things"
        seen["cells"] += [[*key, outcome] for key, outcome in (cells[0] or {}).items()]

    given = ("world", "record_property")
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in given]
    parameters += inspect.signature(case).parameters.values()
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__, test.__module__, test.__doc__ = case.__name__, case.__module__, case.__doc__
    test.__qualname__ = case.__qualname__
    test.on_rank = case  # type: ignore[attr-defined]
    return test


# --- for the cases -----------------------------------------------------------------------------------


def has_join() -> bool:
    """Whether ranks may make different numbers of steps here: not every backend has a ``join()``."""
    return type(current_model().training).join is not Training.join


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], text: str = "") -> Any:
    """``pytest.raises`` with a text that has to occur in the message."""
    with pytest.raises(kind) as info:
        yield info
    assert text in str(info.value), f"{text!r} not in {info.value!s}"


class count_collectives(AbstractContextManager["count_collectives"]):
    """How many collectives this rank runs in the block, by wrapping the primitives of the live transport.

    ``dtypes`` are those of the tensors that they sent.

    Replicas of XLA share a model: each counts its own calls, through the wrappers that the first has made.
    """

    _primitives = ("all_reduce", "reduce_narrow", "all_gather", "gather_bytes", "broadcast", "barrier")
    _primitives += ("all_to_all", "reduce_scatter")
    _lock = threading.RLock()
    _counting: ClassVar[dict[int, count_collectives]] = {}

    def __enter__(self) -> count_collectives:
        self.count, self._depth = 0, 0
        self.dtypes: set[torch.dtype] = set()
        with self._lock:
            self._transport = current_model().transport
            for name in self._primitives if not self._counting else ():
                setattr(self._transport, name, self._counted(getattr(self._transport, name)))
            self._counting[threading.get_ident()] = self
        return self

    @classmethod
    def _counted(cls, primitive: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            own = cls._counting.get(threading.get_ident())
            if own is None:
                return primitive(*args, **kwargs)
            if own._depth == 0:
                own.count += 1
                own.dtypes.update(one.dtype for one in args[:1] if isinstance(one, torch.Tensor))
            own._depth += 1
            try:
                work = primitive(*args, **kwargs)
                return Completed(work.wait()) if isinstance(work, Steps) else work
            finally:
                own._depth -= 1

        return counted

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            del self._counting[threading.get_ident()]
            for name in self._primitives if not self._counting else ():
                delattr(self._transport, name)
