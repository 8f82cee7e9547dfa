"""A third-party backend: mpi4py carries the collectives, over Open MPI or any other MPI.

    mpirun -np 2 python examples/digits.py --backend mpi4py     # after `pip install mpi4py`

In your own script, also started by mpirun::

    import mpi4py_backend                      # registers the backend
    idist.initialize("mpi4py")

`ignite_dist/comp_models/base.py` documents what each method must do; `docs/testing.md`, how to test it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import zlib
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from ignite_dist import register_computation_model
from ignite_dist.comp_models.base import ComputationModel, Group, Transport, Work, waits_for_ranks

# MPI's names of dtypes and operations. `ignite_dist` sends other dtypes and operations (float16, MIN of
# floats) as one of these, or gathers and reduces them on each rank. MPI's own MIN of floats may lose a NaN.
DTYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int32: "INT32_T", torch.int64: "INT64_T"}
OPS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX", "AND": "BAND", "OR": "BOR", "XOR": "BXOR"}


@register_computation_model
class MpiModel(ComputationModel):
    """A context. It has its own communicator, so the script may also use mpi4py directly."""

    name = "mpi4py-dist"
    library = "mpi4py.MPI"
    available_backends = ("mpi4py",) if find_spec("mpi4py") else ()
    live: MpiModel | None = None
    has_failed = False

    def __init__(self, mpi: Any) -> None:
        self.comm = mpi.COMM_WORLD.Dup()
        super().__init__(MpiTransport(mpi, self.comm))

    @classmethod
    def open(cls, backend: str) -> MpiModel:  # type: ignore[override]  # this backend has no options
        if cls.library not in sys.modules:  # otherwise the script has started MPI, and also ends it
            import mpi4py

            mpi4py.rc.finalize = False
            atexit.register(cls.finalize_mpi, os.getpid())
        from mpi4py import MPI

        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise RuntimeError("MPI was started for one thread only: request THREAD_MULTIPLE.")
        cls.live, cls.has_failed = cls(MPI), False
        cls.live.find_topology()  # every rank takes part in this exchange, so no getter communicates later
        return cls.live

    @classmethod
    def find(cls) -> MpiModel | None:
        return cls.live  # MPI may run without a context: importing mpi4py.MPI starts MPI

    def is_current(self) -> bool:
        return MpiModel.live is self

    def close(self) -> None:
        MpiModel.live = None
        for comm in filter(None, [group.comm for group in self.transport.groups]):
            comm.Free()

    def abort(self) -> None:
        MpiModel.live, MpiModel.has_failed = None, True

    @classmethod
    def finalize_mpi(cls, pid: int) -> None:
        # MPI_Finalize waits for all ranks. A failed rank ends without it, and mpirun then ends the others.
        if os.getpid() == pid and not cls.has_failed and not hasattr(sys, "last_type"):
            sys.modules[cls.library].Finalize()

    def context_mark(self) -> object | None:
        return self

    @classmethod
    def prepare_forked_child(cls) -> object | None:
        return cls.live

    def get_rank(self) -> int:
        return self.comm.rank

    def get_world_size(self) -> int:
        return self.comm.size

    def device(self) -> torch.device:
        return torch.device("cpu")

    def backend(self) -> str | None:
        return "mpi4py"


class MpiGroup:
    """A handle of `new_group()`. A rank outside of the group has no communicator."""

    def __init__(self, comm: Any, ranks: tuple[int, ...], key: str) -> None:
        self.comm, self.ranks, self.key = comm, ranks, key


class MpiTransport(Transport):
    """MPI's nonblocking collectives on tensors, without a copy of the tensors."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi, self.world, self.is_over = mpi, MpiGroup(comm, tuple(range(comm.size)), ""), False
        self.groups = [self.world]

    def supports(self, kind: str, op: str | None, dtype: torch.dtype, device: torch.device) -> bool:
        if kind == "all_reduce":
            ops = ("SUM", "PRODUCT") if dtype.is_floating_point else OPS
            return device.type == "cpu" and dtype in DTYPES and op in ops
        return device.type == "cpu" and kind in ("all_gather", "broadcast")  # of any dtype, as bytes

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        sent = [self.memory(tensor)[0], getattr(self.mpi, DTYPES[tensor.dtype])]
        request = self.comm(group).Iallreduce(self.mpi.IN_PLACE, sent, getattr(self.mpi, OPS[op]))
        return MpiWork(self, request, tensor)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        rows = tensor.new_empty((len(group.ranks), *tensor.shape)) if out is None else out
        request = self.comm(group).Iallgather(self.memory(tensor), self.memory(rows))
        return MpiWork(self, request, rows, tensor)

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        return MpiWork(self, self.comm(group).Ibcast(self.memory(tensor), group.ranks.index(src)), tensor)

    def barrier(self, group: Group) -> Work:
        return MpiWork(self, self.comm(group).Ibarrier(), None)

    def memory(self, tensor: Tensor) -> list[Any]:
        return [self.mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), self.mpi.BYTE]

    def comm(self, group: Group) -> Any:
        return (group.handle or self.world).comm

    def make_group(self, ranks: tuple[int, ...]) -> MpiGroup:  # type: ignore[override]  # groups have no options
        key, comm = f"{ranks} {sum(group.ranks == ranks for group in self.groups)}", None
        if self.world.comm.rank in ranks:  # the tag tells apart groups that threads make at once
            tag, members = zlib.crc32(key.encode()) % 30_000, self.world.comm.group.Incl(ranks)
            comm = self.world.comm.Create_group(members, tag)
        self.groups.append(group := MpiGroup(comm, ranks, key))
        return group

    def overlaps(self, group: Group) -> bool:
        return True  # MPI matches the collectives of a communicator by their order

    def separate_group(self, group: Group) -> Work:
        comm, request = self.comm(group).Idup()
        self.groups.append(handle := MpiGroup(comm, group.ranks, "asynchronous"))
        return MpiWork(self, request, group._replace(handle=handle))

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        if not isinstance(handle, MpiGroup) or handle not in self.groups:
            raise ValueError(f"A group is a list of ranks or a result of new_group, got {handle!r}.")
        return handle.ranks

    def group_key(self, group: Group) -> str:
        return (group.handle or self.world).key

    def end_waits(self) -> None:
        self.is_over = True


class MpiWork(Work):
    """A running collective, as MPI's request. It makes progress while a thread of this rank calls MPI."""

    unfinished: ClassVar[set[MpiWork]] = set()  # kept, because MPI may still write to their tensors

    def __init__(self, transport: MpiTransport, request: Any, result: Any, *inputs: Tensor) -> None:
        self.transport, self.request, self.result, self.inputs = transport, request, result, inputs
        self.lock = threading.RLock()  # MPI forbids two threads to test one request at once
        self.unfinished.add(self)

    @waits_for_ranks
    def wait(self, timeout: Any = None) -> Any:
        pause = 0.0
        while not self.is_completed():
            time.sleep(pause)  # MPI's own wait would use a whole core, which other ranks may need
            pause = min(pause + 1e-6, 1e-3)
        if self in self.unfinished:
            raise RuntimeError("Another rank has ended, so this collective cannot complete.")
        return self.result

    def is_completed(self) -> bool:
        with self.lock:
            if self.request.Test():
                self.unfinished.discard(self)
        return self not in self.unfinished or self.transport.is_over
