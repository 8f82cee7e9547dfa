"""A wait for gradients ends when another rank of Horovod has ended, and the error names that rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from torch.optim import LBFGS, SGD

import ignite_dist as idist

pytestmark = pytest.mark.horovod

X = torch.ones(1, 2)


def backward(model: Any, optimizer: Any) -> None:
    model(X).sum().backward()


def step(model: Any, optimizer: Any) -> None:
    optimizer.step()


def synchronize(model: Any, optimizer: Any) -> None:
    optimizer.synchronize()


def clip(model: Any, optimizer: Any) -> None:
    idist.clip_grad_norm(model, 1.0)


def skip(model: Any, optimizer: Any) -> None:
    with idist.grad_sync(model, optimizer):
        pass


def closure(model: Any, optimizer: Any) -> None:
    """Rank 1 has come to the gradients, and not to the mean of the losses."""
    optimizer.step(lambda: model(X).sum().detach())


WAITS: dict[str, Callable[[Any, Any], None]] = {
    one.__name__: one for one in (backward, step, synchronize, clip, skip, closure)
}


def alone(local_rank: int, wait: str, folder: Path) -> None:
    """Rank 1 has ended; then the others wait for its gradients, and then Horovod has ended.

    What a rank raises in the end is explained by ``spawn`` too, so it notes what it has seen itself.
    """
    model = idist.auto_model(Linear(2, 1))
    make: Any = LBFGS if wait == "closure" else SGD
    optimizer = idist.auto_optim(make(model.parameters(), lr=0.1))
    if idist.get_rank() == 1:
        if wait == "closure":
            optimizer.synchronize()
        return
    for _ in range(2):
        with pytest.raises(idist.MissingRanksError) as info:
            WAITS[wait](model, optimizer)
        assert info.value.ranks == [1] and "the end of its context" in info.value.where[1]
    (folder / "named").touch()
    raise info.value


@pytest.mark.parametrize("wait", list(WAITS))
def test_a_wait_for_gradients_of_a_rank_that_has_ended(wait: str, tmp_path: Path) -> None:
    with pytest.raises(idist.RankFailedError) as info:
        idist.spawn("horovod", alone, (wait, tmp_path), nproc_per_node=2)
    assert (tmp_path / "named").exists()
    assert (info.value.rank, info.value.error_type) == (0, "MissingRanksError")


def alone_in_two_sets(local_rank: int, folder: Path) -> None:
    """The world waits, and its ranks that are left have a process set of their own too."""
    import horovod.torch as hvd

    hvd.add_process_set([0, 1])
    model = idist.auto_model(Linear(2, 1))
    idist.auto_optim(SGD(model.parameters(), lr=0.1))
    if idist.get_rank() == 2:
        return
    with pytest.raises(idist.MissingRanksError) as info:
        backward(model, None)
    assert info.value.ranks == [2]
    (folder / f"named by {idist.get_rank()}").touch()
    raise info.value


def test_it_is_known_which_ranks_gradients_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    with pytest.raises(idist.RankFailedError) as info:
        idist.spawn("horovod", alone_in_two_sets, (tmp_path,), nproc_per_node=3)
    assert list(tmp_path.iterdir())
    assert info.value.error_type == "MissingRanksError" and "Rank 2 " in str(info.value)


def late_for_an_asynchronous_call(_: int, folder: Path) -> None:
    idist.watch_for_hangs(timedelta(seconds=1))
    idist.barrier()  # opens the shared memory that the asynchronous call uses
    if idist.get_rank() == 1:
        while not (folder / "is told").exists():
            time.sleep(0.02)
    idist.barrier(async_op=True).wait()


def test_the_watchdog_reports_a_wait_for_an_asynchronous_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = idist.spawn("horovod", late_for_an_asynchronous_call, (tmp_path,), nproc_per_node=2, join=False)
    said = ""
    while "A collective has waited" not in said and "raised an error" not in said:
        time.sleep(0.05)
        said += "".join(capfd.readouterr())
    (tmp_path / "is told").touch()
    workers.join()
    assert "raised an error" not in said
