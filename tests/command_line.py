"""Run a command of the command line, in a process of its own or in this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from helpers import plain_environ, python_that_forks
from ignite_dist.cli.main import main


def run_here(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """As :func:`run_command`, in this process."""
    try:
        status = main(list(map(str, arguments)))
    except SystemExit as end:
        status = int(end.code or 0)
    return (status, *capfd.readouterr())


def run_command(*arguments: str, under: Sequence[str] = (), **environ: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of ``python -m ignite_dist``."""
    ended = subprocess.run(
        [sys.executable if under else python_that_forks(), *under, "-m", "ignite_dist", *arguments],
        env=plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr
