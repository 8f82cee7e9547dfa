"""Replicas of XLA that stay alive between tests, and the models that they train."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import (
    Linear,
    Module,
    ReLU,
    Sequential,
)
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

import ignite_dist as idist

SIZE = 12
SECONDS = 90.0


def launch(function: Callable[..., Any], *args: Any, nproc_per_node: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_DEVICE", "CPU")
        patch.setenv("CPU_NUM_DEVICES", str(nproc_per_node))
        return idist.spawn("xla-tpu", function, args, nproc_per_node=nproc_per_node, join=False)


class Replicas:
    """Two replicas that are kept from test to test. A test that fails in them, or hangs, costs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connections: list[Connection] = []
        self._workers: Any = None

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        """What ``function(*args)`` returned on each of them."""
        if self._workers is None:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting and (ready := wait(list(waiting), seconds)):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = ("it died", None)
        failed = [f"rank {rank}:\n{text}" for rank, (text, _) in sorted(answers.items()) if text]
        failed += [f"rank {rank}: no answer within {seconds} s" for rank in waiting.values()]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return [result for _, (_, result) in sorted(answers.items())]

    def _start(self) -> None:
        with Listener(str(self._folder / "functions"), "AF_UNIX") as listener:
            self._workers = launch(serve, listener.address, nproc_per_node=2)
            accepted = [listener.accept() for _ in range(2)]
        by_rank = {connection.recv(): connection for connection in accepted}
        self._connections = [by_rank[rank] for rank in range(2)]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._workers is not None:
            self._workers.terminate()
        self._connections, self._workers = [], None


def serve(_: int, address: str) -> None:
    with Client(address, "AF_UNIX") as connection:
        connection.send(idist.get_rank())
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                return
            try:
                answer = ("", function(*args))
            except BaseException:
                answer = (traceback.format_exc(), None)
            connection.send_bytes(pickle.dumps(answer))  # not send(), which would share a tensor's memory


def equal_those_of_a_single_process(
    replicas: Replicas,
    function: Callable[..., Any],
    *cases: tuple[Any, ...],
    rtol: float = 1e-12,
    atol: float = 1e-13,
) -> None:
    """Compare what ``function(*case)`` returns on each replica, for each case, with what it returns here."""
    for case in cases or ((),):
        alone = function(*case)
        first, second = replicas.run(function, *case)
        torch.testing.assert_close(first, alone, rtol=rtol, atol=atol)
        same_bits(second, first)


def same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def here(values: Any) -> Any:
    """Copies of the tensors on the CPU, in the containers that they come in."""
    if any(isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in tree_flatten(values)[0]):
        sys.modules["torch_xla"].sync()  # one graph for all of them; else each would be compiled by itself
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), values)


def values(model: Module) -> list[Tensor]:
    found: list[Tensor] = here(list(model.parameters()))
    return found


def state(optimizer: Optimizer) -> list[Any]:
    """Its state dict, as something that assert_close takes: it knows no strings."""
    state = optimizer.state_dict()
    groups = [
        {name: repr(one).encode() if isinstance(one, str | list) else one for name, one in group.items()}
        for group in state["param_groups"]
    ]
    return [here(sorted(state["state"].items())), groups]


def different(model: Module) -> Module:
    """Let it start differently on each replica."""
    # From a generator of its own: the global one is shared by all replicas of a process.
    generator = torch.Generator().manual_seed(3 + idist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def net(dtype: torch.dtype = torch.float64) -> Sequential:
    net = different(Sequential(Linear(5, 8), ReLU(), Linear(8, 2)).to(dtype))
    assert isinstance(net, Sequential)
    return net


def data(number: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The samples of a step: this replica's share of all samples."""
    generator = torch.Generator().manual_seed(4 + number)
    x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(SIZE, 2, generator=generator, dtype=torch.float64).to(dtype)
    mine = slice(idist.get_rank(), None, idist.get_world_size())
    return x[mine].to(idist.device()), y[mine].to(idist.device())


def backward(model: Module, number: int = 0) -> Tensor:
    x, y = data(number, next(model.parameters()).dtype)
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss


def stepped(how: str, optimizer: Optimizer, closure: Callable[[], Tensor]) -> Tensor:
    """A step, and its loss: of this replica alone, or what the step returns."""
    if how == "closure":
        return optimizer.step(closure)
    if how == "keyword":
        return optimizer.step(closure=closure)
    loss = closure()
    assert optimizer.step() is None
    return idist.all_reduce(loss.detach(), "AVERAGE")
