"""Tensors of accelerators inside objects, without an accelerator: where they arrive."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.environments import devices
from ignite_dist.values import safe_objects, serialization
from ignite_dist.values.arrivals import arrival_device, arriving_on
from ignite_dist.workers.sent_calls import encode_call
from on_ranks import on_ranks

CPU, OWN = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("sent", "receiver", "expected"),
    [
        ("cuda:3", OWN, OWN),  # not on the sender's index
        ("cuda:3", CPU, CPU),
        ("cuda:3", None, CPU),  # a launcher
        ("xpu:0", OWN, CPU),
        ("cpu", OWN, CPU),
    ],
)
def test_a_tensor_arrives_on_the_device_of_the_receiver(
    sent: str, receiver: torch.device | None, expected: torch.device
) -> None:
    with arriving_on(lambda: receiver):
        assert arrival_device(sent) == expected
    assert arrival_device(sent) == CPU


class OnGpu:
    """Is pickled as the storage of a tensor on another rank's GPU is."""

    def __reduce__(self) -> Any:
        return serialization._storage, (bytearray([1, 2, 3]), "cuda:3")


def test_a_process_without_an_accelerator_is_asked_only_for_tensors_of_one() -> None:
    asked = []
    storage = serialization.decode(serialization.encode(OnGpu()), lambda: asked.append(1))
    assert storage.tolist() == [1, 2, 3] and storage.device == CPU and asked == [1]
    serialization.decode(serialization.encode({"x": torch.ones(3)}), lambda: asked.append(2))
    assert asked == [1]


def _said_to_be_on_gpu(_: Any) -> str:
    return "cuda:3"


def test_safe_objects_arrive_on_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", _said_to_be_on_gpu)
    saved = safe_objects.save({"x": torch.ones(2)})
    assert safe_objects.load(saved, 0)["x"].tolist() == [1, 1]


def test_a_tensor_without_data_stays_so() -> None:
    assert safe_objects.load(safe_objects.save(torch.ones(2, device="meta")), 0).is_meta


def _asks_for_its_device(rank: int) -> list[int]:
    """How often the device of this rank is asked for in each exchange of a tensor of another GPU."""
    idist.safe_objects()
    model, found = current_model(), []
    own_device, asked = model.device, Counter[str]()

    def device() -> torch.device:
        asked["device"] += sys._getframe(1).f_code is arrival_device.__code__
        return own_device()

    model.device = model.objects._device = device  # type: ignore[method-assign]
    torch.serialization.location_tag = _said_to_be_on_gpu  # type: ignore[assignment]
    value = {"x": torch.full((2,), float(rank)), "more": "x" * 2000}
    for exchange in (
        lambda: idist.all_gather(value),
        lambda: [idist.broadcast(value)],
        lambda: [idist.scatter([value, value] if rank == 0 else None), None],
    ):
        asked.clear()
        assert any(one is not None and one["x"].device == CPU for one in exchange())
        found.append(asked["device"])
    return found


def test_every_exchange_asks_for_the_device_of_the_rank() -> None:
    assert on_ranks(_asks_for_its_device) == [[2, 1, 1], [2, 1, 1]]


def _takes(rank: int, value: OnGpu) -> tuple[int, str]:
    return rank, str(value.device)  # type: ignore[attr-defined]


def test_arguments_arrive_on_the_device_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(devices, "of_local_rank", lambda rank: asked.append(rank))
    call = encode_call(partial(_takes, value=OnGpu()))
    assert call.decode(3)(3) == (3, "cpu") and asked == [3]


def _loads_an_optimizer(rank: int) -> list[float]:
    torch.serialization.location_tag = _said_to_be_on_gpu  # rank 0's GPU, which the others do not have
    model = idist.auto_model(torch.nn.Linear(1, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 1) * (rank + 1)).sum().backward()
    optimizer.step()
    state = idist.optimizer_state(optimizer)
    optimizer.state.clear()
    idist.load_optimizer_state(optimizer, state)
    return [float(values["momentum_buffer"].sum()) for values in optimizer.state.values()]


def test_rank_0s_optimizer_is_loaded_without_rank_0s_gpu() -> None:
    assert on_ranks(_loads_an_optimizer) == [[1.5, 1.0], [1.5, 1.0]]
