"""Notebooks, and the cells of a real kernel.

``python tests/notebooks.py`` runs ``examples/notebook.ipynb`` and stores its outputs, which the site shows.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import AsyncKernelManager, KernelManager
from nbclient import NotebookClient

from helpers import ROOT, plain_environ

EXAMPLE = ROOT / "examples" / "notebook.ipynb"
_COLOR = re.compile(r"\x1b\[[\d;]*m")


@contextmanager
def _manager(kind: type[Any]) -> Iterator[tuple[Any, dict[str, str]]]:
    """The manager of a kernel, and the environment that keeps it from the user's settings.

    They talk through files. Over TCP, the manager looks for free ports and hands their numbers to the kernel:
    until that binds them, which takes a second, anything on the machine may take them.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        environ = plain_environ(CUDA_VISIBLE_DEVICES="", **dict.fromkeys(names, folder))
        environ.pop("PYTEST_CURRENT_TEST", None)  # under pytest, ipykernel does not capture the files 1 and 2
        yield kind(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel"), environ


def read(path: Path) -> Any:
    """The notebook in the file."""
    return nbformat.read(path, as_version=4)


class _Client(NotebookClient):
    """Counts how often the cells have replaced what they show."""

    num_updates = 0

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.num_updates += msg["msg_type"] == "update_display_data"
        return super().process_message(msg, cell, cell_index)


def executed(path: Path) -> tuple[Any, int]:
    """The notebook with the outputs of a run, and how often a cell has replaced what it shows."""
    notebook = read(path)
    with _manager(AsyncKernelManager) as (manager, environ):
        client = _Client(notebook, km=manager, timeout=120, coalesce_streams=True, record_timing=False)
        client.execute(env=environ, cleanup_kc=True)  # the client does not own the manager
    return notebook, client.num_updates


@dataclass
class Cell:
    """What the kernel has sent for a cell: ``stdout`` and ``stderr``, and the lines of an error."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    is_done: bool = False


@dataclass
class Kernel:
    """A running kernel."""

    manager: Any
    client: BlockingKernelClient
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def start(self, code: str) -> Cell:
        """Start a cell, and do not wait for it."""
        return self.cells.setdefault(self.client.execute(code), Cell())

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        cell = self.start(code)
        self.read_until(lambda: cell.is_done)
        return cell

    def read_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Read the kernel's messages until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.cells
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            cell = self.cells.get(message["parent_header"].get("msg_id"), Cell())
            content = message["content"]
            if message["msg_type"] == "stream":
                setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
            elif message["msg_type"] == "error":
                cell.error = _COLOR.sub("", "\n".join(content["traceback"]))
            elif content.get("execution_state") == "idle":
                cell.is_done = True


@contextmanager
def kernel() -> Iterator[Kernel]:
    """A kernel with ``import ignite_dist as idist``."""
    with _manager(KernelManager) as (manager, environ):
        manager.start_kernel(env=environ)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            started = Kernel(manager, client)
            assert not started.run("import ignite_dist as idist, logging, os, sys, time").error
            yield started
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    nbformat.write(executed(EXAMPLE)[0], EXAMPLE)
