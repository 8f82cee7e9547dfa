"""Jobs of XLA: replicas that spawn starts, and scripts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import helpers
import ignite_dist as idist


def spawn(function: Any, *args: Any, nproc_per_node: int = 2, **kwargs: Any) -> Any:
    return idist.spawn("xla-tpu", function, args, nproc_per_node=nproc_per_node, **kwargs)


def run_script(folder: Path, text: str, **environ: str) -> str:
    """What the script printed; it must succeed."""
    ended = helpers.run_python(helpers.write_script(folder, text), env=helpers.plain_environ(**environ))
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def who(local_rank: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    assert idist.all_reduce(1) == idist.get_world_size()
    return {
        "ranks": (local_rank, idist.get_rank(), idist.get_local_rank()),
        "sizes": (idist.get_world_size(), idist.get_nproc_per_node(), idist.get_nnodes()),
        "model": (idist.model_name(), idist.backend(), str(idist.device())),
        "called": (args, kwargs),
        "process": (os.getpid(), threading.current_thread() is threading.main_thread()),
    }
