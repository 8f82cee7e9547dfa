"""Run a command of the command line in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from helpers import (
    plain_environ,
)


def run_command(*arguments: str, under: Sequence[str] = (), **environ: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of ``python -m ignite_dist``."""
    ended = subprocess.run(
        [sys.executable, *under, "-m", "ignite_dist", *arguments],
        env=plain_environ(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr
