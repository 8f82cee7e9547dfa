"""``check``: every collective over every dtype, on the ranks of this job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import ignite_dist as idist
from ignite_dist.cli import network, values
from ignite_dist.cli.jobs import Steps
from ignite_dist.collectives.primitives import sent_dtype
from ignite_dist.comp_models.transport import CollectiveKind
from ignite_dist.context.live import current_model
from ignite_dist.values import reduce_ops


class Cell(NamedTuple):
    """The outcome of one collective with one dtype.

    Attributes:
        operation: the collective, and the operation of a reduction.
        dtype: the dtype of the tensors; ``""`` if the operation does not depend on a dtype.
        outcome: "passed", "carried" (through another dtype), "refused" or "failed".
        detail: the carrier dtype, the reason of the refusal, or the error.
        rank: the rank on which the collective failed.
    """

    operation: str
    dtype: str
    outcome: str
    detail: str = ""
    rank: int | None = None


class CheckReport(NamedTuple):
    """The results of ``check`` from all ranks."""

    backend: str
    device: str
    world_size: int
    hosts: list[str]
    cells: list[Cell]
    links: list[network.Link]
    slow_hosts: list[str]

    @property
    def failures(self) -> list[Cell]:
        """The failed cells. A cell that failed on several ranks names the lowest of these ranks."""
        return [cell for cell in self.cells if cell.outcome == "failed"]

    @property
    def exit_status(self) -> int:
        """1 if a cell failed, else 0. A slow host is not a failure."""
        return int(bool(self.failures))


def check(steps: Steps) -> CheckReport:
    """Run every collective. Every rank must call this. Returns the same report on every rank."""
    own_cells: list[Cell] = []
    for operation, call in PER_DTYPE.items():
        with steps.step(operation):
            own_cells += [_cell(operation, dtype, partial(call, dtype)) for dtype in values.DTYPES]
    for operation, plain_call in _OTHERS.items():
        with steps.step(operation):
            own_cells.append(_cell(operation, None, plain_call))
    with steps.step("the links between hosts"):
        links = network.measure(steps.hosts)
    with steps.step("the exchange of the outcomes"):
        cells = [_worst(column) for column in zip(*idist.all_gather(own_cells), strict=True)]
    return CheckReport(
        backend=str(idist.backend()),
        device=idist.device().type,
        world_size=idist.get_world_size(),
        hosts=steps.hosts,
        cells=cells,
        links=links,
        slow_hosts=network.slow_hosts(links),
    )


def _cell(operation: str, dtype: torch.dtype | None, call: Callable[[], str]) -> Cell:
    """The outcome of ``call``.

    If an operation is refused, all ranks raise before any communication, so their next calls still match.
    """
    name = short(dtype) if dtype else ""
    op = operation.partition(" ")[2]
    refusal = ""
    if dtype is not None and op in values.OPS:
        try:
            reduce_ops.check_op(op, dtype)
        except TypeError as error:
            refusal = str(error)
    failed = partial(Cell, operation, name, "failed", rank=idist.get_rank())
    try:
        carrier = call()
    except TypeError as error:
        return Cell(operation, name, "refused", refusal) if refusal else failed(f"TypeError: {error}")
    except (AssertionError, ValueError, NotImplementedError) as error:
        return failed(str(error) or type(error).__name__)
    if refusal:
        return failed(f"no TypeError, expected: {refusal}")
    return Cell(operation, name, "carried" if carrier else "passed", carrier)


def _worst(column: tuple[Cell, ...]) -> Cell:
    """One cell for all ranks: the failure of the lowest rank; without failures, the cell of rank 0."""
    return next((cell for cell in column if cell.outcome == "failed"), column[0])


def short(dtype: torch.dtype) -> str:
    """The name of ``dtype`` without ``torch.``, for example ``float32``."""
    return str(dtype).removeprefix("torch.")


def _require(is_right: bool, found: Any, wanted: Any) -> None:
    if not is_right:
        texts = [repr(x.tolist() if isinstance(x, torch.Tensor) else x) for x in (found, wanted)]
        raise AssertionError(f"got {texts[0]}, expected {texts[1]}")


# --- checks that run once per dtype, and return the name of the carrier dtype ------------------------------


def _carrier(collective: CollectiveKind, tensor: torch.Tensor, op: str = "") -> str:
    """The carrier dtype; ``""`` if ``tensor`` is sent unchanged, ``"gather"`` if all values are gathered."""
    sent = sent_dtype(current_model(), collective, tensor, op)
    return "gather" if sent is None else "" if sent is tensor.dtype else short(sent)


def _all_reduce(op: str, dtype: torch.dtype) -> str:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    tensor = values.contribution(op, rank, world_size, dtype).to(idist.device())
    result = idist.all_reduce(tensor, op)
    _require(
        result is tensor and values.is_right(op, tensor, world_size, dtype),
        tensor,
        values.reduced(op, world_size, dtype),
    )
    return _carrier("all_reduce", tensor, op)


def _all_gather(dtype: torch.dtype) -> str:
    tensor = values.own_rows(idist.get_rank(), dtype).to(idist.device())
    wanted = torch.cat([values.own_rows(rank, dtype) for rank in range(idist.get_world_size())])
    found = idist.all_gather(tensor)
    _require(values.is_same(found, wanted), found, wanted)
    return _carrier("all_gather", tensor)


def _ragged(dtype: torch.dtype) -> str:
    """Gather tensors of ``(rank + 1) % 3`` rows."""
    wanted = [values.own_rows(rank, dtype, (rank + 1) % 3) for rank in range(idist.get_world_size())]
    tensor = wanted[idist.get_rank()].to(idist.device())
    found = idist.all_gather_ragged(tensor)
    is_right = len(found) == len(wanted) and all(map(values.is_same, found, wanted))
    _require(is_right, [rows.tolist() for rows in found], [rows.tolist() for rows in wanted])
    return _carrier("all_gather", tensor)


def _broadcast(dtype: torch.dtype) -> str:
    rank, last = idist.get_rank(), idist.get_world_size() - 1
    for src in sorted({0, last}):
        tensor = values.own_rows(rank, dtype).to(idist.device())
        idist.broadcast(tensor, src=src)
        wanted = values.own_rows(src, dtype)
        _require(values.is_same(tensor, wanted), tensor, wanted)
    return _carrier("broadcast", tensor)


PER_DTYPE: dict[str, Callable[[torch.dtype], str]] = {
    **{f"all_reduce {op}": partial(_all_reduce, op) for op in values.OPS},
    "all_gather": _all_gather,
    "all_gather_ragged": _ragged,
    "broadcast": _broadcast,
}


# --- without a dtype ----------------------------------------------------------------------------------------


def _barrier() -> str:
    idist.barrier()
    return ""


def _safe_mode() -> str:
    """Broadcast a tensor and an object that only the last rank has."""
    src = idist.get_world_size() - 1
    wanted = values.own_rows(src, torch.float32)
    is_src = idist.get_rank() == src
    found = idist.broadcast(wanted.to(idist.device()) if is_src else None, src=src, safe_mode=True)
    _require(values.is_same(found, wanted), found, wanted)
    text = idist.broadcast("from the last" if is_src else None, src=src, safe_mode=True)
    _require(text == "from the last", text, "from the last")
    return ""


def _objects() -> str:
    """Gather and broadcast small objects (sent in the header) and large objects (sent after the header)."""
    ranks = range(idist.get_world_size())
    for size in (1, 10_000):
        wanted = [{"rank": rank, "text": "x" * size} for rank in ranks]
        found = idist.all_gather(wanted[idist.get_rank()])
        _require(found == wanted, found, wanted)
        found = idist.broadcast(wanted[idist.get_rank()], src=0)
        _require(found == wanted[0], found, wanted[0])
    return ""


def _trees() -> str:
    """Reduce a tree of tensors and numbers. One number is too large for every int dtype."""
    world_size = idist.get_world_size()
    ones = torch.ones(3, device=idist.device())
    found: dict[str, Any] = idist.all_reduce({"count": 2**80, "loss": 0.5, "tensors": [ones, ones.long()]})
    found["tensors"] = [tensor.tolist() for tensor in found["tensors"]]
    sums = [[float(world_size)] * 3, [world_size] * 3]
    wanted = {"count": world_size * 2**80, "loss": world_size / 2, "tensors": sums}
    _require(found == wanted, found, wanted)
    return ""


def _groups() -> str:
    """Reduce in the groups of even and of odd ranks. Each group is given as a list and as a handle."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    for ranks in (list(range(0, world_size, 2)), list(range(1, world_size, 2))):
        if not ranks:
            continue
        handle = idist.new_group(ranks)
        for group in (ranks, handle):
            tensor = torch.tensor([rank + 1], device=idist.device())
            idist.all_reduce(tensor, group=group)
            wanted = sum(ranks) + len(ranks) if rank in ranks else rank + 1
            _require(tensor.tolist() == [wanted], tensor, [wanted])
        idist.barrier(group=ranks)
    return ""


def _one_to_all() -> str:
    """Gather on the last rank and scatter from it: small and large objects."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    last = world_size - 1
    for size in (1, 10_000):
        wanted = [str(other) * size for other in range(world_size)]
        found = idist.gather(wanted[rank], last)
        _require(found == (wanted if rank == last else None), found, wanted)
        own = idist.scatter(wanted if rank == last else None, last)
        _require(own == wanted[rank], own, wanted[rank])
    return ""


def _exchanges() -> str:
    """Exchange rows, and reduce rows, one for each rank."""
    rank, world_size = idist.get_rank(), idist.get_world_size()
    rows = torch.arange(world_size, device=idist.device()) + 100 * rank
    found = idist.all_to_all(rows).tolist()
    _require(found == [100 * other + rank for other in range(world_size)], found, rank)
    reduced, wanted = (
        idist.reduce_scatter(rows).tolist(),
        [sum(100 * other + rank for other in range(world_size))],
    )
    _require(reduced == wanted, reduced, wanted)
    return ""


_OTHERS: dict[str, Callable[[], str]] = {
    "barrier": _barrier,
    "broadcast, safe mode": _safe_mode,
    "objects": _objects,
    "numbers and trees": _trees,
    "groups": _groups,
    "gather and scatter": _one_to_all,
    "reduce_scatter and all_to_all": _exchanges,
}
