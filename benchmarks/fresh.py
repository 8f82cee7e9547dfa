"""Measurements in a fresh process: `python fresh.py import|getters|launches|steps LIBRARY ...` prints JSON.

Workers import this file as their main module. At its top this file imports only the standard library, so that
workers import nothing that the measured library does not need.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import QUICK, memory_of, time_in_turn

_TIMEOUT_SECONDS = 300


def libraries() -> list[tuple[str, str]]:
    """The contenders that work here, and their modules."""
    found = [("ours", "ignite_dist")]
    # Without a process group pytorch-ignite 0.5.5 calls functions that torch_xla no longer has.
    if importlib.util.find_spec("ignite") and not importlib.util.find_spec("torch_xla"):
        found.append(("ignite", "ignite.distributed"))
    return found


def run(measurement: str, library: str, *args: object) -> Any:
    """Run a measurement of this file in a new interpreter and return its result."""
    command = [sys.executable, __file__, measurement, library, *map(str, args)]
    # pip compiles the packages that it installs. This checkout is compiled by its first import, if allowed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _import(library: str) -> float:
    importlib.import_module("torch")
    gc.freeze()  # otherwise a garbage collection of torch's objects may fall into the measurement
    start = time.perf_counter()
    importlib.import_module(library)
    return time.perf_counter() - start


def _getters(library: str, *names: str) -> dict[str, list[float]]:
    module = importlib.import_module(library)
    effort = QUICK._replace(row_seconds=0.3)
    return {name: time_in_turn({name: getattr(module, name)}, effort)[name] for name in names}


def _launches(library: str, *counts: str) -> list[dict[str, Any]]:
    """Successive launches: memory, and seconds from the call until the last rank leaves the barrier."""
    module = importlib.import_module(library)
    launches = []
    for workers in map(int, counts):
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            module.spawn("gloo", _worker, args=(library, directory), nproc_per_node=workers)
            results = [json.loads(path.read_text()) for path in Path(directory).iterdir()]
        assert len(results) == workers, results
        launch = {"workers": workers, "seconds": max(result["end"] for result in results) - start}
        for field in ("PSS", "USS"):
            launch[field] = statistics.median(result[field] for result in results)
        launches.append(launch)
    return launches


def _worker(local_rank: int, library: str, directory: str) -> None:
    module = importlib.import_module(library)
    module.barrier()
    end = time.perf_counter()  # one clock for all processes of the machine
    module.barrier()  # all workers must still run while their shared memory is counted
    result = {"end": end, **_memory()}
    (Path(directory) / str(local_rank)).write_text(json.dumps(result))
    module.barrier()


def _steps(library: str) -> list[float]:
    """Two launches: seconds from the call until both workers have made their first DDP step."""
    module = importlib.import_module(library)
    seconds = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            if library == "torch.multiprocessing":
                module.spawn(_trainer, (directory, True), nprocs=2)
            elif library == "torch.distributed.run":
                _torchrun("trainer", directory)
            else:
                module.spawn("gloo", _trainer, args=(directory, False), nproc_per_node=2)
            ends = [float(path.read_text()) for path in Path(directory).iterdir() if path.suffix == ".end"]
        assert len(ends) == 2, ends
        seconds.append(max(ends) - start)
        time.sleep(2)  # as the row's name says: somebody looks at the results
    return seconds


def _torchrun(*arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    subprocess.run([*command, *arguments], capture_output=True, timeout=_TIMEOUT_SECONDS, check=True)


def _trainer(local_rank: int, directory: str, needs_group: bool) -> None:
    torch: Any = importlib.import_module("torch")
    if needs_group:
        init_method = f"file://{directory}/store"
        torch.distributed.init_process_group("gloo", init_method, rank=local_rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    (Path(directory) / f"{local_rank}.end").write_text(str(time.perf_counter()))
    if needs_group:
        del model, optimizer
        gc.collect()  # DDP is a cycle with the group; freed at the exit, it aborts some of the processes
        torch.distributed.destroy_process_group()


def _memory() -> dict[str, int]:
    """Bytes. PSS: a page shared by n processes counts 1/n in each. USS: pages of this process only."""
    return {"PSS": memory_of("Pss"), "USS": memory_of("Private_Clean") + memory_of("Private_Dirty")}


if __name__ == "__main__" and sys.argv[1] == "trainer":
    _trainer(int(os.environ["LOCAL_RANK"]), sys.argv[2], needs_group=True)
elif __name__ == "__main__":
    _measure = {"import": _import, "getters": _getters, "launches": _launches, "steps": _steps}[sys.argv[1]]
    print(json.dumps(_measure(*sys.argv[2:])))
