"""Arguments that ``torch.multiprocessing.spawn`` shares with its workers are the same object here too."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
import os
import socket
from multiprocessing import shared_memory, sharedctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.nn import Linear

import ignite_dist as idist
from helpers import run_python
from spawned import spawn

METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"]


def _fill(rank: int, tensor: torch.Tensor) -> None:
    tensor[rank] = rank + 1


def _train(rank: int, models: dict[str, Linear]) -> None:
    with torch.no_grad():
        models["shared"].weight[rank] = rank + 1
        models["own"].weight[rank] = rank + 1


def _use(rank: int, parts: dict[str, Any]) -> tuple[int, float, bool]:
    with parts["lock"], parts["value"].get_lock():
        parts["value"].value += 1
    parts["array"][rank] = parts["raw"][rank] = rank + 1
    parts["listed"].append(rank)
    parts["block"].buf[rank] = rank + 1
    parts["out"].put(rank)
    parts["its"].put([rank, rank])
    if rank == 0:
        parts["end"].send("from rank 0")
        parts["socket"].sendall(b"x")
        parts["event"].set()
    else:
        parts["event"].wait()
    parts["barrier"].wait()
    return parts["asked"].get(), parts["tensor"].sum().item(), parts["again"] is parts["lock"]


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_in_shared_memory(method: str) -> None:
    results = torch.zeros(4).share_memory_()
    spawn(_fill, results[1:3], start_method=method)
    assert results.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_shared_memory_and_one_that_is_not(method: str) -> None:
    models = {"shared": Linear(1, 2), "own": Linear(1, 2)}
    models["shared"].share_memory()
    before = models["own"].weight.tolist()
    spawn(_train, models, start_method=method)
    assert models["shared"].weight.tolist() == [[1], [2]]
    assert models["own"].weight.tolist() == before and not models["own"].weight.is_shared()


@pytest.mark.parametrize("method", METHODS)
def test_what_multiprocessing_shares(method: str) -> None:
    context = multiprocessing.get_context(method)
    of_torch = torch.multiprocessing.get_context(method)
    begin, end = context.Pipe(duplex=False)
    here, there = socket.socketpair()
    block = shared_memory.SharedMemory(create=True, size=8)
    with context.Manager() as manager, here, there:
        parts: dict[str, Any] = {
            "lock": context.Lock(),
            "value": context.Value("i", 40),
            "array": context.Array("i", 2),
            "raw": sharedctypes.RawArray("i", 2),
            "listed": manager.list(),
            "block": block,
            "out": context.Queue(),
            "its": of_torch.SimpleQueue(),
            "asked": context.Queue(),
            "end": end,
            "socket": there,
            "event": context.Event(),
            "barrier": context.Barrier(2),
            "tensor": torch.ones(3).share_memory_(),
        }
        parts["again"] = parts["lock"]
        for number in (10, 10):
            parts["asked"].put(number)
        assert spawn(_use, parts, start_method=method) == [(10, 3, True)] * 2
        assert parts["value"].value == 42
        assert list(parts["array"]) == list(parts["raw"]) == list(block.buf[:2]) == [1, 2]
        assert sorted(parts["listed"]) == [0, 1]
        assert sorted(parts["out"].get() for _ in range(2)) == [0, 1]
        assert sorted(parts["its"].get() for _ in range(2)) == [[0, 0], [1, 1]]
        assert begin.recv() == "from rank 0" and here.recv(1) == b"x"
        for name in ("out", "asked"):
            parts[name].close()
            parts[name].join_thread()
    block.close()
    block.unlink()


def _count(rank: int, counter: Any) -> None:
    with counter.get_lock():
        counter.value += 1
    idist.barrier()
    if idist.restart_count() == 0 and rank == 1:
        os._exit(3)


def test_all_attempts_share_the_same() -> None:
    counter = multiprocessing.get_context("forkserver").Value("i", 0)
    spawn(_count, counter, max_restarts=1)
    assert counter.value == 4


def test_a_closure_shares_what_it_has() -> None:
    results, queue = torch.zeros(2).share_memory_(), multiprocessing.get_context("forkserver").SimpleQueue()

    def work(rank: int) -> None:
        results[rank] = rank + 1
        queue.put(rank)

    spawn(work)
    assert results.tolist() == [1, 2] and sorted(queue.get() for _ in range(2)) == [0, 1]


def test_what_cannot_be_shared_is_named() -> None:
    fork, of_fork = multiprocessing.get_context("fork"), r"fork context.*get_context\('forkserver'\)"
    for value, reason in (
        *((kind(), of_fork) for kind in (fork.Queue, fork.SimpleQueue, fork.Lock, fork.Event)),
        *((kind, of_fork) for kind in (fork.Value("i"), fork.Barrier(2), fork.JoinableQueue())),
        ([torch.ones(1).share_memory_() for _ in range(300)], "about 250 shared .*start_method='spawn'"),
        (multiprocessing.pool.ThreadPool(1), "pool objects cannot be passed .*underlying data"),
    ):
        with pytest.raises(TypeError, match=reason):
            spawn(print, value)


class Marked(torch.Tensor):
    pass


def _write_to_all(rank: int, tensors: dict[str, Any]) -> list[str]:
    with torch.no_grad():
        for one in tensors.values():
            one[rank] = rank + 5
    return [type(one).__name__ for one in tensors.values()]


def test_tensors_of_all_kinds() -> None:
    base = torch.zeros(2, 2).share_memory_()
    tensors: dict[str, Any] = {
        "parameter": torch.nn.Parameter(torch.zeros(2).share_memory_()),
        "not a leaf": torch.nn.Parameter(base)[0],
        "column": base[:, 1],
        "subclass": torch.zeros(2).share_memory_().as_subclass(Marked),
        "transposed": torch.zeros(2, 2).share_memory_().t(),
        "copied": torch.zeros(2),
    }
    kinds = ["Parameter", "Tensor", "Tensor", "Marked", "Tensor", "Tensor"]
    assert spawn(_write_to_all, tensors) == [kinds] * 2
    assert base[0, 0] == 5 and base[1].tolist() == [0, 6]  # two ranks write to base[0, 1]
    assert tensors["parameter"].tolist() == tensors["subclass"].tolist() == [5, 6]
    assert tensors["transposed"].tolist() == [[5, 5], [6, 6]] and tensors["copied"].tolist() == [0, 0]


def test_a_subclass_that_workers_cannot_import(tmp_path: Path) -> None:
    code = (
        "import torch, ignite_dist as idist\n"
        "class Own(torch.Tensor): pass\n"
        "def work(rank, x): x[rank] = rank + 1; return type(x).__name__\n"
        "x = torch.zeros(2).share_memory_().as_subclass(Own)\n"
        "print(idist.spawn('gloo', work, (x,), nproc_per_node=2), x.tolist())"
    )
    assert run_python("-c", code).stdout == "['Own', 'Own'] [1.0, 2.0]\n"


def test_what_nobody_can_send_is_named_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"^Argument 1 of print cannot be sent to a worker: .*generator"):
        spawn(print, (one for one in ()))


def _rows_of(rank: int, rows: list[torch.Tensor], shared: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    shared[rank] += rows[rank][0]
    own = torch.arange(1_000_000.0).view(1000, 1000)
    return rows[0].untyped_storage().nbytes(), [own[3 * rank + 1], own[500]]


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_batch_and_of_a_shared_tensor(method: str) -> None:
    batch = torch.arange(400_000.0).view(100, 4000)
    shared = torch.zeros(100, 4).share_memory_()
    results = spawn(_rows_of, [batch[3], batch[50]], shared[7], start_method=method)
    assert shared[7].tolist() == [12_000, 200_000, 0, 0] and shared.sum() == 212_000
    own = torch.arange(1_000_000.0).view(1000, 1000)
    for rank, (num_bytes, rows) in enumerate(results):
        assert num_bytes == (batch.nbytes if method == "fork" else batch[3].nbytes)
        assert torch.equal(rows[0], own[3 * rank + 1]) and torch.equal(rows[1], own[500])
        assert rows[0].untyped_storage().nbytes() == rows[0].nbytes


def _large_result(rank: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((700_000,), float(rank)), "y": torch.arange(3)}


def test_large_results_can_be_changed() -> None:
    for rank, result in enumerate(idist.spawn("gloo", _large_result, nproc_per_node=2)):
        assert torch.equal(result["x"].add_(1), torch.full((700_000,), rank + 1.0))
        assert result["y"].tolist() == [0, 1, 2]
