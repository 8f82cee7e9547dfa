"""Fifteen cases on one GPU, each in a process of its own: what is right, and what was seen.

    python tests/gpu_cases.py                  # all cases
    python tests/gpu_cases.py graphs objects   # some
    python tests/gpu_cases.py --device cpu     # a dry run over gloo, which finds mistakes in this file

A case is a function here. Its docstring says what is right; the function returns what it has seen, or raises.
The exit status is 1 if a case is not as expected.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import ignite_dist as idist
from case_runner import case, main
from helpers import ROOT, free_port, plain_environ, run_new_python
from ignite_dist.values import serialization

# The children of this script see no GPU with --device cpu.
ON_GPU = torch.cuda.device_count() > 0
BACKEND = "nccl" if ON_GPU else "gloo"
_MB = 1 << 20


# --- what several cases need ---------------------------------------------------------------------------


@contextmanager
def _context(backend: str = BACKEND, **options: Any) -> Iterator[torch.device]:
    idist.initialize(backend, **options)
    yield idist.device()
    idist.finalize()


def _keep_busy(seconds: float) -> None:
    """Work for the GPU, in its current stream. At most 2 GHz are assumed. Nothing on the CPU."""
    if ON_GPU:
        torch.cuda._sleep(int(seconds * 2e9))


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _calls(x: Tensor, op: str = "SUM") -> dict[str, Callable[[], Any]]:
    """The collectives of a tensor, which in a world of one give ``x``."""
    out = torch.zeros_like(x)
    return {
        "all_reduce": lambda: idist.all_reduce(x.clone(), op=op),
        "reduce": lambda: idist.reduce(x.clone(), op=op),
        "reduce_scatter": lambda: idist.reduce_scatter(x, op=op),
        "all_gather": lambda: idist.all_gather(x),
        "all_gather(out=)": lambda: idist.all_gather(x, out=out),
        "all_gather_tensors_with_shapes": lambda: idist.all_gather_tensors_with_shapes(x, [x.shape])[0],
        "all_to_all": lambda: idist.all_to_all(x),
        "broadcast": lambda: idist.broadcast(x.clone(), src=0),
        "gather": lambda: idist.gather(x),
        "scatter": lambda: idist.scatter([x]),
        "all_reduce(async_op=True)": lambda: idist.all_reduce(x.clone(), op=op, async_op=True).wait(),
    }


_OBJECT_CALLS: dict[str, Callable[[], Any]] = {
    "number": lambda: idist.all_reduce(1.5),
    "dict": lambda: idist.all_reduce({"loss": 0.5, "n": 3}),
    "object": lambda: idist.all_gather({"name": "x" * 1000}),
    "broadcast of an object": lambda: idist.broadcast({"name": "x" * 1000}, src=0),
    "barrier": lambda: idist.barrier(),
}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _two_ranks(code: str, seconds: float) -> list[tuple[int, float, str]]:
    """Exit status, seconds and output of two ranks that share the GPU, as a Slurm step starts them.

    ``SLURM_TRES_PER_TASK`` says that each rank sees a GPU of its own, which is wrong here.
    """
    port, started = str(free_port()), time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=plain_environ(
                SLURM_JOB_ID="1",
                SLURM_STEP_NUM_TASKS="2",
                SLURM_STEP_NUM_NODES="1",
                SLURM_STEP_TASKS_PER_NODE="2",
                SLURM_NODEID="0",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_TRES_PER_TASK="gres/gpu:1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    ended: list[tuple[int, float, str]] = []
    for rank in ranks:
        try:
            output, _ = rank.communicate(timeout=max(1.0, started + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            output = f"{rank.communicate()[0]}\nstill running after {seconds:.0f} s"
        ended.append((rank.returncode, time.monotonic() - started, output))
    return ended


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# --- the cases -------------------------------------------------------------------------------------------


@case("1")
def collectives() -> str:
    """In a world of one, every collective gives its argument back, for every dtype, on the same device."""
    wrong, count = [], 0
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64)
    with _context() as device:
        for dtype in dtypes:
            x = (torch.arange(1024, device=device) % 7).to(dtype).view(64, 16)
            for name, call in _calls(x, "OR" if dtype is torch.bool else "SUM").items():
                count += 1
                if not _same_bytes(call(), x):
                    wrong.append(f"{name} of {dtype}")
        for call in _OBJECT_CALLS.values():
            call()
        memory = torch.cuda.max_memory_reserved() // _MB if ON_GPU else 0
    assert not wrong, wrong
    return f"{count} calls of tensors, {len(_OBJECT_CALLS)} others; at most {memory} MB reserved by torch"


@case("2")
def host_waits() -> str:
    """No collective of one tensor makes the CPU wait for the GPU. Numbers, objects and barriers do."""
    waits: list[str] = []
    with _context() as device:
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            x = torch.ones(1024, 16, device=device, dtype=dtype)
            calls = _calls(x)
            for call in calls.values():  # the first call makes the plan and the streams
                call()
            waits += [f"{name} of {dtype}" for name, call in calls.items() if _waits(call)]
        others = [name for name, call in _OBJECT_CALLS.items() if _waits(call)]
    assert not waits, f"these wait: {', '.join(waits)}"
    return f"no tensor's call waits; of the others: {', '.join(others) or 'none'}"


def _waits(call: Callable[[], Any]) -> bool:
    """True if torch's own check finds that the call synchronizes."""
    if not ON_GPU:
        call()
        return False
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@case("3", alone=True)
def streams() -> str:
    """Behind a busy GPU: calls of a tensor return at once, their results wait in the stream. An asynchronous
    result is right in the stream that waits for it. A dropped Work keeps its memory until it has ended."""
    late, seconds = [], {}
    with _context() as device:
        x = torch.arange(1 << 16, device=device, dtype=torch.float32).view(64, -1)
        for dtype in (torch.float32, torch.bfloat16):
            for name, call in _calls(x.to(dtype)).items():
                call()
                _synchronize()
                _keep_busy(0.3)
                start = time.perf_counter()
                result = call()
                took = time.perf_counter() - start
                if ON_GPU and took > 0.15:
                    late.append(f"{name} of {dtype}: {took:.2f} s")
                assert _same_bytes(result, x.to(dtype)), name
        for name, call in _OBJECT_CALLS.items():
            _keep_busy(0.3)
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start
            _synchronize()
        _check_side_stream(x)
        _check_dropped_work(device)
    assert not late, f"these waited: {', '.join(late)}"
    return "seconds behind 0.3 s: " + ", ".join(f"{name} {took:.2f}" for name, took in seconds.items())


def _check_side_stream(x: Tensor) -> None:
    side = torch.cuda.Stream() if ON_GPU else None
    _keep_busy(0.3)
    work = idist.all_reduce(x.clone(), async_op=True)
    with torch.cuda.stream(side):
        result = work.wait() + 1
    if side is not None:
        side.synchronize()
    assert torch.equal(result, x + 1), "a side stream did not wait"


def _check_dropped_work(device: torch.device) -> None:
    """New tensors would take the memory of the argument, if the dropped Work did not keep it."""
    for _ in range(10):
        out = torch.zeros(1 << 20, device=device)
        _keep_busy(0.05)
        idist.all_gather(torch.ones(1 << 20, device=device), out=out, async_op=True)
        gc.collect()
        filled = [torch.full((1 << 20,), 7.0, device=device) for _ in range(4)]
        _synchronize()
        time.sleep(0.01)
        _synchronize()
        assert out.eq(1).all(), "the memory of a dropped Work was given away"
        del filled


@case("4")
def loader_worker() -> str:
    """In a forked worker of a DataLoader every getter answers as in the rank itself."""
    with _context():
        own = _getters()
        loader = DataLoader(_Asks(), num_workers=1, collate_fn=list, multiprocessing_context="fork")
        (found,) = next(iter(loader))
    assert found == own, f"{found} instead of {own}"
    return f"{len(own)} getters, device {own['device']}"


def _getters() -> dict[str, str]:
    names = ("device", "backend", "model_name", "hostname", "is_global_zero", "is_local_zero", "get_rank")
    more = ("get_world_size", "get_local_rank", "get_nproc_per_node", "get_nnodes", "get_node_rank")
    return {name: str(getattr(idist, name)()) for name in (*names, *more)}


class _Asks:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return _getters()


@case("5", seconds=120, alone=True)
def hang() -> str:
    """A collective that hangs ends the rank after the timeout (5 s) and torch's own report (1 s is asked
    for), within 20 s of the call. The error names the signal and NCCL's timeout. A restart works."""
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    ranks = 1 if ON_GPU else 2
    options: dict[str, Any] = {"timeout": timedelta(seconds=5), "nproc_per_node": ranks}
    path = Path(tempfile.mkdtemp(), "begun")
    try:
        idist.spawn(BACKEND, _hangs, (path,), **options)
    except idist.RankFailedError as error:
        message, took = str(error), time.time() - path.stat().st_mtime
    else:
        raise AssertionError("nothing was raised")
    text = f"{took:.1f} s: {' '.join(message.split())[:400]}"
    assert took < 20, text
    assert not ON_GPU or ("SIGABRT" in message and "NCCL aborts after the timeout" in message), text
    start = time.monotonic()
    assert idist.spawn(BACKEND, _hangs, (path,), max_restarts=1, **options) == [1] * ranks
    return f"{text}; with a restart {time.monotonic() - start:.1f} s"


def _hangs(local_rank: int, path: Path) -> int:
    if idist.restart_count():
        return idist.restart_count()
    x = torch.ones(4, device=idist.device())
    idist.all_reduce(x)
    path.touch()
    _keep_busy(40)
    if not ON_GPU and local_rank:
        time.sleep(9)
    idist.all_reduce(x)
    idist.all_reduce(1.5)  # waits for the GPU
    return 0


@case("6", seconds=90, alone=True)
def failure() -> str:
    """An exception while a collective waits behind 20 s of work is the error of the launch, at the latest
    when the grace period (10 s) is over, within 13 s of the exception. The process has gone."""
    path = Path(tempfile.mkdtemp(), "raised")
    try:
        idist.spawn(BACKEND, _fails, (path,))
    except idist.RankFailedError as error:
        took = time.time() - path.stat().st_mtime
        assert "ValueError: on purpose" in str(error), error
        pid = error.error_pid
    else:
        raise AssertionError("nothing was raised")
    assert not [process for process in psutil.process_iter() if process.pid == pid], "the process is there"
    start = time.monotonic()
    alone = _last_line(run_new_python("-c", _ABORTS, str(Path(__file__).parent), seconds=60).stdout)
    seen = f"{took:.1f} s; abort() alone: {alone}, its process {time.monotonic() - start:.1f} s"
    assert took < 13, seen
    return seen


def _fails(local_rank: int, path: Path | None = None) -> None:
    x = torch.ones(1 << 20, device=idist.device())
    idist.all_reduce(x)
    _keep_busy(20)
    idist.all_reduce(x)
    if path is not None:
        path.touch()
    raise ValueError("on purpose")


_ABORTS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import gpu_cases
from ignite_dist.context import live
live.initialize(gpu_cases.BACKEND)
try:
    gpu_cases._fails(0)
except ValueError:
    start = time.perf_counter()
    live.abort()
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
"""


@case("7")
def launchers() -> str:
    """Each start method works. Neither the launcher nor the fork server has a context of CUDA."""
    pids: set[int] = set()
    for method in ("forkserver", "spawn", "fork"):
        ((device, value, seen),) = idist.spawn("auto", _adds, start_method=method)
        assert (device, value) == ("cuda:0" if ON_GPU else "cpu", 1.0), (method, device, value)
        pids |= seen
    with idist.Parallel("auto", nproc_per_node="auto") as parallel:
        assert parallel.run(_adds)[1] >= 1.0
    assert not torch.cuda.is_initialized(), "the launcher has started CUDA"
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    assert not pids & own, f"contexts of {sorted(pids & own)}"
    return f"three start methods, Parallel; nvidia-smi named {len(pids)} processes"


def _adds(local_rank: int) -> tuple[str, float, set[int]]:
    value = idist.all_reduce(torch.ones((), device=idist.device())).item()
    return str(idist.device()), value, _processes_on_gpu()


def _processes_on_gpu() -> set[int]:
    """The processes that nvidia-smi names; none in some containers."""
    if not ON_GPU:
        return set()
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    return {int(line) for line in listed.split() if line.isdecimal()}


@case("8", alone=True)
def gigabyte() -> str:
    """Reductions of 1 GB in bfloat16 need at most 0.25 GB beside their argument and their result. That is
    1.25 GB for reduce_scatter, which receives the rows of all ranks first."""
    numel = (1 << 29) if ON_GPU else (1 << 20)
    seen, wrong = [], []
    with _context() as device:
        x = torch.ones(numel, device=device, dtype=torch.bfloat16)
        linear = torch.nn.Linear(1, 1, bias=False, device=device)
        linear.weight = torch.nn.Parameter(x.view(1, -1))
        out = torch.empty_like(x)
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "all_reduce": (lambda: idist.all_reduce(x), 0),
            "all_reduce(exact=False)": (lambda: idist.all_reduce(x, exact=False), 0),
            "all_reduce(MAX)": (lambda: idist.all_reduce(x, op="MAX"), 0),
            "reduce_scatter": (lambda: idist.reduce_scatter(x), x.nbytes),
            "reduce_scatter(out=)": (lambda: idist.reduce_scatter(x, out=out), 0),
            "average_parameters": (lambda: idist.average_parameters(linear), 0),
        }
        for name, (call, result_bytes) in calls.items():
            milliseconds, kernels, peak = _measured(call)
            more = max(0, peak - result_bytes) / x.nbytes
            seen.append(f"{name} {milliseconds:.1f} ms, {kernels} kernels, {more:.2f} more")
            if more > (1.25 if "scatter" in name else 0.25):
                wrong.append(name)
        assert x.eq(1).all()
    assert not wrong, "; ".join(seen)
    return "; ".join(seen)


def _measured(call: Callable[[], Any]) -> tuple[float, int, int]:
    """Milliseconds of the second call, its number of kernels, and its peak of allocated bytes."""
    call()
    if not ON_GPU:
        return 0.0, 0, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    call()
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return took * 1000, kernels, peak


@case("9", seconds=150)
def suite_nccl() -> str:
    """A part of the conformance suite passes over NCCL. All of it is `pytest -m gpu -k nccl-1`."""
    return _suite("nccl-1" if ON_GPU else "gloo-2", "test_agreement.py", "test_numbers.py", "test_async.py")


def _suite(world: str, *files: str) -> str:
    folder = ROOT / "ignite_dist" / "testing" / "conformance"
    marks = ["-m", "gpu"] if ON_GPU else []
    plugins = ["-p", "pytest_ignite_dist", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    paths = [str(folder / name) for name in files]
    ended = run_new_python("-m", "pytest", "-q", *plugins, *marks, "-k", world, *paths, seconds=145)
    summary = _last_line(ended.stdout)
    assert ended.returncode == 0 and re.search(r"\b\d+ passed", summary), ended.stdout[-1500:]
    return summary


@case("10")
def shared_gpu() -> str:
    """Two ranks of NCCL that were given the same GPU both end, within 30 s, and the error says so."""
    code = f"""
        import ignite_dist as idist, torch
        idist.initialize({BACKEND!r})
        print(idist.all_reduce(torch.ones((), device=idist.device())).item())
        idist.finalize()
    """
    ended = _two_ranks(code, 40)
    seconds = max(took for _, took, _ in ended)
    if not ON_GPU:
        assert [status for status, *_ in ended] == [0, 0], ended
        return f"{seconds:.1f} s"
    for status, took, output in ended:
        assert status and took < 30, (status, took, output[-600:])
    texts = [_last_line(output) for *_, output in ended]
    assert all("have the same GPU" in output for *_, output in ended), texts
    return f"{seconds:.1f} s: {texts[0][:300]}"


@case("11", seconds=90)
def two_backends() -> str:
    """cpu:gloo,cuda:nccl, without a collective on the GPU: a loop of barriers is not reported as a wait. A
    rank that waits for one that has called finalize() raises MissingRanksError within 15 s."""
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "cpu:gloo"
    code = f"""
        import logging, time
        from datetime import timedelta
        import ignite_dist as idist, torch
        logging.basicConfig(level=logging.WARNING)
        idist.initialize({backend!r})
        idist.watch_for_hangs(timedelta(seconds=4))
        end = time.monotonic() + 12
        while not idist.any_true(time.monotonic() > end):
            idist.barrier()
            time.sleep(0.02 if idist.get_rank() else 0.0)
        print("loop ended", flush=True)
        if idist.get_rank():
            idist.finalize()
        else:
            start = time.monotonic()
            try:
                idist.all_reduce(torch.ones(()))
            except idist.MissingRanksError:
                print(f"raised after {{time.monotonic() - start:.1f}} s", flush=True)
    """
    ended = _two_ranks(code, 70)
    outputs = [output for *_, output in ended]
    for output in outputs:
        before = output.partition("loop ended")[0]
        assert "loop ended" in output and "WARNING" not in before, output[-1500:]
    raised = re.search(r"raised after ([\d.]+) s", outputs[0])
    assert raised and float(raised[1]) < 15, outputs[0][-1500:]
    return raised[0]


@case("12", seconds=180)
def suite_gloo() -> str:
    """Models and checkpoints pass over gloo with two ranks on the GPU: DDP, hooks, SyncBatchNorm, FSDP2. All
    of the suite is `pytest -m gpu -k gloo-cuda-2`."""
    return _suite("gloo-cuda-2" if ON_GPU else "gloo-2", "test_models.py")


@case("13", seconds=150)
def graphs() -> str:
    """A CUDA graph of a step with collectives replays them. torch.compile gives right results, and says that
    it makes no CUDA graph of them."""
    with _context() as device:
        replayed = _replay(device) if ON_GPU else "no graph"
        torch._dynamo.reset()
        from torch._dynamo.utils import counters

        step = torch.compile(_reduces, mode="reduce-overhead" if ON_GPU else None)
        for number in range(4):
            x = torch.full((8,), float(number), device=device)
            assert torch.equal(step(x), x * 2 + 1), number
        skips = counters["inductor"]["cudagraph_skips"]
    assert not ON_GPU or skips, "no skip was counted"
    return f"{replayed}; cudagraph_skips {skips}"


def _reduces(x: Tensor) -> Tensor:
    return idist.all_reduce(x * 2) + 1


def _replay(device: torch.device) -> str:
    inputs = {
        dtype: torch.zeros(1 << 12, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    }

    def step() -> dict[torch.dtype, Tensor]:
        return {dtype: idist.all_reduce(x * 2) + 1 for dtype, x in inputs.items()}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for number in (1, 3):
        for x in inputs.values():
            x.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        for dtype, output in outputs.items():
            assert output.eq(number * 2 + 1).all(), (dtype, number, output[:2])
    return "captured and replayed float32 and bfloat16"


@case("14", seconds=120)
def objects() -> str:
    """Tensors on the GPU inside objects arrive with their values, dtypes, strides of views and device, and
    their payloads have no more than the views use: over NCCL, over gloo with two ranks, with safe objects, in
    arguments and results of spawn, in checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        for backend, ranks in ((BACKEND, 1), ("gloo", 2)):
            idist.spawn(backend, _exchanges_views, (f"{folder}/{backend}-{ranks}.pt",), nproc_per_node=ranks)
        sent = _views(torch.device("cuda" if ON_GPU else "cpu"))
        received = idist.spawn(BACKEND, _returns, (sent,))[0]
    _compare(received, sent, device=None)
    devices = {str(value.device) for value in received.values()}
    return f"{len(sent)} kinds of views; results of spawn in the launcher are on {', '.join(sorted(devices))}"


def _views(device: torch.device) -> dict[str, Tensor]:
    whole = torch.arange(1 << 16, dtype=torch.float32, device=device).view(256, 256)
    z = torch.complex(whole, whole + 1)
    halves = whole.to(torch.bfloat16)
    return {
        "row": whole[3],
        "rows": whole[4:6],
        "overlap": whole[5:7],
        "column": whole.clone()[:, 5],
        "block": whole[10:14, 20:24],
        "transposed": whole[30:32].T,
        "expanded": whole[40, :1].expand(1000),
        "number": whole[50, 50],
        "empty": whole[:0],
        "bfloat16": halves[7, ::2],
        "bytes": whole[60].view(torch.uint8)[4:8],
        "bool": whole[70] > 5,
        "conjugate": z[3].conj(),
        "negative": z[4].conj().imag,
        "gradient": torch.nn.Parameter(whole[80]),
        "whole": torch.ones(8, device=device),
        "float8": halves[8].to(torch.float8_e4m3fn),
        "sparse": torch.eye(3, device=device).to_sparse(),
        "on the CPU": torch.arange(10.0)[3:5],
    }


def _compare(received: dict[str, Tensor], sent: dict[str, Tensor], device: torch.device | None) -> None:
    assert received.keys() == sent.keys()
    for name, one in sent.items():
        other = received[name]
        if device is not None and name != "on the CPU":
            assert other.device == device, (name, other.device)
        one, other = one.detach(), other.detach().to(one.device)
        if one.is_sparse:
            one, other = one.to_dense(), other.to_dense()
        assert _same_bytes(one, other), name
        assert type(received[name]) is type(sent[name]), name
        assert received[name].requires_grad == sent[name].requires_grad, name
    rows, overlap = received["rows"], received["overlap"]
    rows[1].fill_(-1.0)
    assert overlap[0].eq(-1).all(), "views that overlap no longer share memory"


def _exchanges_views(local_rank: int, path: str) -> None:
    device = idist.device()
    for is_safe in (False, True):
        if is_safe:
            idist.safe_objects()
        for name in ("gathered", "broadcast"):
            sent = _views(device)
            call = idist.all_gather if name == "gathered" else lambda sent: [idist.broadcast(sent, src=0)]
            for received in call(sent):
                _compare(received if received is not sent else dict(sent), _views(device), device)
    sent = _views(device)
    payload = len(serialization.encode(sent))
    assert payload < 40_000, f"{payload} bytes"
    _compare(serialization.decode(serialization.encode(sent), idist.device), _views(device), device)
    saved = {name: value for name, value in _views(device).items() if name != "sparse"}
    idist.save_checkpoint(path, **{name.replace(" ", "_"): value for name, value in saved.items()})
    size = Path(path).stat().st_size
    assert size < 60_000, f"a checkpoint of {size} bytes"
    loaded = idist.load_checkpoint(path)
    for name, one in saved.items():
        found = loaded[name.replace(" ", "_")]
        assert found.device.type == "cpu" and _same_bytes(found, one.detach().cpu()), name
    _checks_modules(device, path)


def _checks_modules(device: torch.device, path: str) -> None:
    """A module and its optimizer's state, in an object and in a checkpoint."""
    module = torch.nn.Linear(4, 4, device=device)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
    for received in idist.all_gather(state):
        assert received["module"]["weight"].device == device
    idist.save_checkpoint(path, model=module, optimizer=optimizer)
    again = torch.nn.Linear(4, 4, device=device)
    other = torch.optim.Adam(again.parameters())
    idist.load_checkpoint(path, model=again, optimizer=other)
    assert again.weight.device == device
    if idist.get_rank() == 0:
        assert torch.equal(again.weight, module.weight)
        moments = [one.state_dict()["state"][0]["exp_avg"] for one in (optimizer, other)]
        assert torch.equal(*moments) and moments[1].device == device


def _returns(local_rank: int, value: dict[str, Tensor]) -> dict[str, Tensor]:
    assert value["row"].device.type == idist.device().type
    return value


@case("14 b", seconds=90, alone=True)
def asynchronous_save() -> str:
    """An asynchronous save of 2 GB returns before the file is written, and saves the values of the call."""
    count, numel = 4, (1 << 27) if ON_GPU else (1 << 20)
    with _context() as device, tempfile.TemporaryDirectory() as folder:
        values = {f"x{i}": torch.full((numel,), float(i), device=device) for i in range(count)}
        _synchronize()
        start = time.perf_counter()
        saved = idist.save_checkpoint(f"{folder}/x.pt", asynchronous=True, **values)
        stall = time.perf_counter() - start
        for value in values.values():
            value.add_(1)
        saved.wait()
        took = time.perf_counter() - start
        loaded = idist.load_checkpoint(f"{folder}/x.pt")
        right = all(loaded[f"x{i}"].eq(float(i)).all() for i in range(count))
    assert right, "the file has later values"
    assert stall < took, (stall, took)
    return f"the call took {stall:.2f} s, until the file was written {took:.2f} s"


@case("15", seconds=170)
def commands() -> str:
    """env, check and bench run with NCCL and one process. Tests for CPUs pass with the GPU visible."""
    seen = []
    options = ("--backend", BACKEND, "--nproc-per-node", "1")
    sizes = ("--sizes", "4,1M", "--collectives", "all_reduce,barrier")
    for command in (("env",), ("check", *options), ("bench", *options, *sizes)):
        ended = run_new_python("-m", "ignite_dist", *command)
        assert ended.returncode == 0, f"{command}: {ended.stdout[-1000:]}"
        seen.append(f"{command[0]}: {_last_line(ended.stdout).strip()[:80]}")
    tests = ("tests/data/test_passes.py", "tests/values/test_views.py", "tests/values/test_wire.py")
    plugins = ("-p", "pytest_ignite_dist", "-p", "no:benchmark", "-p", "no:cacheprovider")
    ended = run_new_python("-m", "pytest", "-q", *plugins, "-m", "not gpu and not long", *tests, seconds=120)
    assert ended.returncode == 0, ended.stdout[-1500:]
    return "; ".join([*seen, _last_line(ended.stdout)])


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__))
