"""Runs cases on one rank.

mpirun -np 2 python -m ignite_dist.testing.conformance.ranks BACKEND ADDRESS
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

import ignite_dist as idist
from ignite_dist.comp_models import ComputationModel
from ignite_dist.context import live
from ignite_dist.testing.kept_workers import register_stacks

# pytest starts no session here. It rewrites the assertions of the cases, so that failures show their values.
_ARGUMENTS = ("--capture=no", "--noconftest", "-c", os.devnull, "--rootdir", os.curdir)
_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


def model_of(backend: str) -> type[ComputationModel]:
    """The class that runs a backend. For ``"module:backend"``, the module is imported first.

    Raises:
        ValueError: no class runs it.
        ImportError: there is no such module.
    """
    module, _, name = backend.rpartition(":")
    if module:
        importlib.import_module(module)
    return live.find_model(name)


class Import:
    """A process that receives this object by pickle imports the module."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self._module,)


def serve(local_rank: int, address: str, *modules: Any) -> None:
    """Run cases until the connection is closed.

    Args:
        local_rank: of this rank.
        address: of the process that sends the cases.
        modules: those that this rank has imported before it made the context.
    """
    register_stacks(address)
    with Client(address, "AF_UNIX") as connection:
        connection.send((idist.get_rank(), os.getpid()))
        idist.barrier()  # gloo's ranks decide whether they share memory in their first collective
        if threading.current_thread() is not threading.main_thread():  # a replica of XLA
            _run_cases(connection)
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        exit_code = pytest.main([*_ARGUMENTS], plugins=[_Cases(connection)])
    raise RuntimeError(f"pytest did not start on this rank ({exit_code!r}): see its output.")


class _Cases:
    """A plugin that runs cases in place of pytest's session."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> None:
        """Run cases, and end this process."""
        _run_cases(self._connection)


def _run_cases(connection: Connection) -> None:
    while True:
        try:
            module, name, kwargs = connection.recv()
        except EOFError:
            os._exit(0)  # the world was closed; its ranks do not wait for each other
        try:
            case = getattr(importlib.import_module(module), name).on_rank
            answer: tuple[str, Any] = ("", case(**kwargs))
        except BaseException:
            answer = (traceback.format_exc(), None)
        connection.send(answer)


def _main(backend: str, address: str) -> None:
    model_of(backend)  # registers the backend
    idist.initialize(backend.rpartition(":")[2])
    idist.watch_for_hangs()  # for barrier(timeout=) in contexts without a store
    serve(idist.get_local_rank(), address)


if __name__ == "__main__":
    _main(*sys.argv[1:])
