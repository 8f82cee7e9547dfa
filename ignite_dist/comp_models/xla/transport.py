"""The transport over torch_xla's collectives. They are lazy if this process has one replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.comp_models.transport import STANDARD_DTYPES, CollectiveKind, Group, Sizes, Transport
from ignite_dist.comp_models.work import Completed, Work, waits_for_ranks
from ignite_dist.comp_models.xla import _torch_xla, dtype_views, interrupts, replicas
from ignite_dist.internals import _torch
from ignite_dist.internals.arguments import check_keywords
from ignite_dist.values import message_header

_OPS = {"SUM": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max"}
# PJRT's CPU has no all-reduce for bfloat16. TPUs emulate float64 and have no all-reduce for it: "While
# rewriting computation to not contain X64 element types, XLA encountered ... all-reduce".
_DTYPES_REDUCED_BY_TPUS = STANDARD_DTYPES - {torch.float64} | {torch.bfloat16}

# Replicas of one process must run the same compiled module. Two replicas that compile the same graph at the
# same time get two modules. With this lock, the second replica finds the first replica's module. The lock
# also covers the making of the graph: torch_xla has crashed (SIGSEGV) when two replicas made the graph of a
# collective while a third compiled.
_compiling = threading.Lock()


class XlaTransport(Transport):
    """The collectives of the replicas of this process.

    Args:
        context: gives the rank of the calling replica.
        meeting: synchronises the replicas of this process.
    """

    groups_need_all_ranks: ClassVar[bool] = True
    is_synchronous: ClassVar[bool] = True

    def __init__(self, context: ComputationModel, meeting: replicas.Meeting) -> None:
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model

        self._context = context
        self._meeting = meeting
        self._xm = xla_model
        self._world_size: int = runtime.world_size()
        self._real_names = dict(zip(torch_xla.devices(), xla_model.xla_real_devices(), strict=True))
        self._reduced_dtypes = _DTYPES_REDUCED_BY_TPUS if runtime.device_type() == "TPU" else STANDARD_DTYPES
        self._store = HashStore()  # used if this process runs all replicas

    def store(self) -> Store | None:
        return self._store if self._meeting.size == self._world_size else None

    # --- groups: a handle is a tuple of ranks ------------------------------------------------------------

    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        check_keywords("new_group", options, ())
        return ranks

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        raise ValueError(f"A group is a list of ranks or a result of new_group, got {handle!r}.")

    # --- tensor primitives -----------------------------------------------------------------------------

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        if kind not in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
            return False
        if device.type != "xla":
            return device.type == "cpu" and self._world_size == 1
        return kind != "all_reduce" or (op in _OPS and dtype in self._reduced_dtypes)

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        if tensor.numel() and tensor.device.type == "xla" and not _has_one_rank_of_several(group):
            groups = None
            if group.handle is not None:  # XLA's groups partition the world: each other rank forms a group
                others = set(range(self._world_size)).difference(group.ranks)
                groups = [list(group.ranks), *([rank] for rank in sorted(others))]
            if self._meeting.size == 1 and not _torch.is_view(tensor) and not tensor.is_inference():
                # Reducing in place saves a graph node, but torch_xla would not update the base of a view.
                self._xm.all_reduce(_OPS[op], [tensor], groups=groups)
                return Completed(tensor)
            reduced = self._run(
                _describe(f"all_reduce {op}", tensor, group),
                tensor,
                lambda sent: self._xm.all_reduce(_OPS[op], sent, groups=groups),
            )
            tensor.copy_(reduced)
        return Completed(tensor)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        if len(group.ranks) == 1 or not tensor.numel():
            rows = tensor.unsqueeze(0).expand(len(group.ranks), *tensor.shape).clone()
        else:
            # Gather from the whole world, because XLA's groups would need equal sizes.
            bits_by_rank = self._run(
                _describe("all_gather", tensor, group),
                dtype_views.bits(tensor).unsqueeze(0),
                lambda sent: self._xm.all_gather(sent, pin_layout=False),
            )
            bits = bits_by_rank if group.handle is None else bits_by_rank[list(group.ranks)]
            rows = dtype_views.from_bits(bits, tensor.dtype).view(len(group.ranks), *tensor.shape)
        return Completed(rows if out is None else out.copy_(rows))

    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        num_ranks = len(group.ranks)
        if sizes is None:
            rows = tensor.view(num_ranks, -1)
        else:  # XLA's parts all have the same size
            width = torch.tensor([max(sizes.sent)], device=tensor.device)
            self.all_reduce(width, "MAX", group).wait()
            rows = tensor.new_zeros(num_ranks, int(width.item()))
            for row, part in zip(rows, torch.split(tensor, list(sizes.sent)), strict=True):
                row[: part.numel()] = part
        if not rows.numel():
            return Completed(out)
        bits = self._run(
            _describe("all_to_all", tensor if sizes is None else rows, group),
            dtype_views.bits(rows),
            lambda sent: self._xm.all_to_all(sent, 0, 0, num_ranks, pin_layout=False),
        )
        received = dtype_views.from_bits(bits, tensor.dtype).view(rows.shape)
        if sizes is None:
            return Completed(out.copy_(received.view(-1)))
        parts = [row[:size] for row, size in zip(received, sizes.received, strict=True)]
        return Completed(out.copy_(torch.cat(parts)))

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        if len(group.ranks) == 1 or not tensor.numel():
            return Completed(tensor)
        # A sum of ints, which are zero on all ranks but src, loses no bit. is_src is a tensor, because with a
        # constant the graphs of the replicas would differ, and a collective needs the same graph.
        bits = dtype_views.bits(tensor)
        is_src = torch.tensor([int(self._context.get_rank() == src)], dtype=bits.dtype).to(tensor.device)
        received = self._run(
            _describe(f"broadcast from rank {src}", tensor, group),
            bits * is_src,
            lambda sent: self._xm.all_reduce("sum", sent),
        )
        return Completed(tensor.copy_(dtype_views.from_bits(received, tensor.dtype).view(tensor.shape)))

    def barrier(self, group: Group) -> Work:
        if not _has_one_rank_of_several(group):
            self.meet(f"barrier of ranks {list(group.ranks)}")
        return Completed(None)

    @waits_for_ranks
    def meet(self, call: str) -> None:
        """Return when all replicas have called this method with the same ``call``."""
        self._meeting.meet(self._context.get_rank(), call)
        if self._meeting.size < self._world_size:  # wait for other processes, too
            self.all_reduce(
                torch.zeros(1, device=self._context.device()), "SUM", self._context.groups.world
            ).wait().item()

    @waits_for_ranks
    def _run(self, call: str, tensor: Tensor, collective: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a collective and return its result, which is lazy if this process has one replica.

        Replicas of one process must execute the same graph. So the input is computed first, all replicas
        synchronise, and the output is computed before user code can add to the graph.
        """
        if self._meeting.size == 1:
            return collective(tensor)
        if tensor.device != self._context.device():
            raise ValueError(
                f"The tensor is on {tensor.device}, and this replica's device is {self._context.device()}: "
                "see idist.device()."
            )
        self._xm.unlazy([tensor])
        # An interrupt before the replicas have met ends this call on all replicas, an interrupt after that on
        # none. A replica that left here would block the devices of the others.
        with interrupts.delayed():
            self._meeting.meet(self._context.get_rank(), call)
            with _compiling:
                result = collective(tensor)  # not in place: PJRT's CPU hangs if an input is donated
                _torch_xla.begin_to_compute(result)
            # Otherwise the next collective would depend on this collective, which has already started.
            _torch_xla.forget_order_of_collectives(tensor.device)
            # Running calls occupy threads of a pool; too many of them would block each other. Wait for this
            # device only, because replicas on other devices may wait for this replica.
            self._xm.wait_device_ops([self._real_names[tensor.device]])
        return result


# --- calls -------------------------------------------------------------------------------------------


def _has_one_rank_of_several(group: Group) -> bool:
    """True if ``group`` has one rank and the world has more. Such a group needs no other rank."""
    return group.handle is not None and len(group.ranks) == 1


def _describe(call: str, tensor: Tensor, group: Group) -> str:
    """The description of a collective for users. Objects and numbers begin with a header."""
    size = message_header.HEADER_BYTES * (len(group.ranks) if call == "all_to_all" else 1)
    is_header = tensor.dtype is torch.uint8 and tuple(tensor.shape) == (size,)
    value = "an object or a number" if is_header else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    return f"{call} of {value}" + (f" in the group {list(group.ranks)}" if group.handle is not None else "")
