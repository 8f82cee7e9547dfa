"""The parts of storages that the tensors of an object use, so that pickles and copies contain no more.

torch pickles a tensor with its whole storage: a row of a batch with the batch. A pickler that asks
:class:`Views` for the reduction of each tensor writes these parts instead:

- Views that overlap or touch get one common part, and still share memory when they are loaded.
- A storage of which nearly everything is used stays whole.
- Views with gaps (a column of a matrix) that use less than their range are copied without the gaps. Only
  equal ones still share memory.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from ignite_dist.internals import _torch

# A range of which a larger share is used is sent as it is.
_FULL = 0.9
# By the size of an element in bytes: the dtype with which such elements are copied.
_COPIED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# Several elements in a byte: offsets and sizes do not count bytes.
_PACKED = (torch.quint4x2, torch.quint2x4)


class _View(NamedTuple):
    """A view of a storage, with offset and strides in elements."""

    itemsize: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements. The elements along an expanded dimension are one."""
        own = (size for size, stride in zip(self.size, self.stride, strict=True) if stride or not size)
        return prod(own) * self.itemsize

    @property
    def start(self) -> int:
        """Position of its first byte."""
        return self.offset * self.itemsize

    @property
    def end(self) -> int:
        """Position after its last byte."""
        if not self.nbytes:
            return self.start
        steps = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.start + (steps + 1) * self.itemsize

    def without_gaps(self, storage: UntypedStorage) -> _Part:
        """A copy of its elements, with strides in the same order."""
        if not self.nbytes:
            return _Part(storage[:0], 0, self.stride)
        stride, step = [0] * len(self.size), 1
        for dim in sorted(range(len(self.size)), key=lambda dim: (self.stride[dim], -dim)):
            if self.stride[dim]:
                stride[dim] = step
                step *= self.size[dim]
        own = [size if step else 1 for size, step in zip(self.size, stride, strict=True)]
        elements = torch.empty(0, dtype=_COPIED_AS[self.itemsize], device=storage.device)
        elements.set_(storage, self.offset, own, self.stride)
        copy = torch.empty_strided(own, stride, dtype=elements.dtype, device=storage.device)
        return _Part(copy.copy_(elements).untyped_storage(), 0, tuple(stride))


class _Part(NamedTuple):
    """Where a view is in the pickle: in which storage, from which element, with which strides."""

    storage: UntypedStorage
    offset: int
    stride: tuple[int, ...]


class Views:
    """The views in one object.

    Call :meth:`reduce` for each tensor of the object in a first pass, in which storages stay whole. If
    :meth:`cut` is then True, a second pass gives a smaller pickle.

    Args:
        stays_whole: True for a storage that must not be cut.
        for_pickle: True for pickle, False for ``torch.save``.
    """

    def __init__(
        self, stays_whole: Callable[[UntypedStorage], bool] = lambda _: False, for_pickle: bool = False
    ) -> None:
        self._stays_whole = stays_whole
        self._for_pickle = for_pickle
        # By place, not by object: two tensors may give two objects for one storage.
        self._storages: dict[Any, UntypedStorage] = {}
        self._views: dict[Any, dict[_View, _Part]] = {}
        # A pickler writes an object once. So it writes a storage once for all tensors of a dtype.
        self._typed: dict[tuple[int, torch.dtype], torch.TypedStorage] = {}

    def reduce(self, tensor: Tensor) -> Any:
        """A ``reducer_override`` for tensors: pickle's reduction, with a part of the storage."""
        if type(tensor) in copyreg.dispatch_table:  # a reducer of the user
            return NotImplemented
        reduced: Any = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return self._with_part(reduced, tensor.dtype) if isinstance(reduced, tuple) else reduced

    def _with_part(self, reduced: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        rebuild, args, *others = reduced
        if rebuild is _torch.rebuild_with_type:
            inner, kind, inner_args, *state = args
            inner, inner_args = self._with_part((inner, inner_args), dtype)
            return rebuild, (inner, kind, inner_args, *state), *others
        if rebuild not in _torch.REBUILDS_OF_VIEWS or dtype in _PACKED:
            return reduced
        storage, offset, size, stride, *rest = args
        is_typed = isinstance(storage, torch.TypedStorage)
        view = _View(dtype.itemsize, offset, tuple(size), tuple(stride))
        part = self._part_of(_torch.untyped(storage) if is_typed else storage, view)
        sent: Any = part.storage
        if is_typed:
            sent = self._typed_storage(part.storage, dtype)
        elif self._for_pickle and rebuild is _torch.rebuild_newer_dtype:
            # torch cannot load its own reduction. torch.load makes such a storage too.
            sent = self._typed_storage(part.storage, torch.uint8)
        return rebuild, (sent, part.offset, size, part.stride, *rest), *others

    def part_of(self, tensor: Tensor) -> _Part:
        """The part for ``tensor``, which has a storage with whole elements."""
        size, stride = tuple(tensor.size()), tensor.stride()
        view = _View(tensor.itemsize, int(tensor.storage_offset()), size, stride)
        return self._part_of(tensor.untyped_storage(), view)

    def _part_of(self, storage: UntypedStorage, view: _View) -> _Part:
        place = storage.device, storage.data_ptr(), storage.nbytes()
        storage = self._storages.setdefault(place, storage)
        views = self._views.setdefault(place, {})
        return views.setdefault(view, _Part(storage, view.offset, view.stride))

    def _typed_storage(self, storage: UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
        key = id(storage), dtype
        if key not in self._typed:
            self._typed[key] = _torch.typed(storage, dtype)
        return self._typed[key]

    def cut(self) -> bool:
        """Choose the parts. False if all storages stay whole."""
        was_cut = False
        for place, views in self._views.items():
            storage, ranges = self._storages[place], _ranges(views)
            used = sum(found.nbytes for found in ranges)
            if used < _FULL * storage.nbytes() and not self._stays_whole(storage):
                was_cut = True
                for found in ranges:
                    views.update(found.parts(storage))
        return was_cut


class _Range(NamedTuple):
    """Views that overlap or touch, and the bytes from the first to the last."""

    start: int
    end: int
    views: list[_View]

    @property
    def nbytes(self) -> int:
        """Bytes to send: without the gaps, if the views use much less than the range."""
        used = sum(view.nbytes for view in self.views)
        return used if used < _FULL * (self.end - self.start) else self.end - self.start

    def parts(self, storage: UntypedStorage) -> Iterator[tuple[_View, _Part]]:
        """The part of each view."""
        if self.nbytes < self.end - self.start:
            yield from ((view, view.without_gaps(storage)) for view in self.views)
            return
        start = self.start - self.start % max(view.itemsize for view in self.views)
        part = storage[start : self.end]  # shares the memory
        for view in self.views:
            offset = (view.start - start) // view.itemsize if view.nbytes else 0
            yield view, _Part(part, offset, view.stride)


def _ranges(views: Iterable[_View]) -> list[_Range]:
    ranges: list[_Range] = []
    start = end = 0
    for view in sorted(views, key=lambda view: view.start):
        if not ranges or view.start > end:
            ranges.append(_Range(view.start, view.end, []))
            start, end = view.start, view.end
        end = max(end, view.end)
        ranges[-1].views.append(view)
        ranges[-1] = _Range(start, end, ranges[-1].views)
    return ranges


# --- picklers ----------------------------------------------------------------------------------------


@cache
def _subclass(base: Any) -> type[Any]:
    """A subclass of ``base`` whose instances may have other attributes."""
    return type(base.__name__, (base,), {})


def pickler_of(base: Any, reduce: Callable[[Any], Any], file: Any, buffer_callback: Any) -> Any:
    """A pickler of the class ``base`` that first calls ``reduce``, as a ``reducer_override``."""
    pickler = _subclass(base)(file, pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback)
    inherited = getattr(pickler, "reducer_override", None)
    pickler.reducer_override = reduce if inherited is None else _first(reduce, inherited)
    return pickler


def _first(reduce: Callable[[Any], Any], inherited: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reducer_override(obj: Any) -> Any:
        found = reduce(obj)
        return inherited(obj) if found is NotImplemented else found

    return reducer_override


def save(value: Any, file: IO[bytes], base: Any = pickle.Pickler) -> None:
    """``torch.save`` without the parts of storages that no tensor of ``value`` uses.

    Args:
        value: the value.
        file: an open file.
        base: a class of picklers.
    """
    views = Views()
    with suppress(Exception):  # torch.save raises what is wrong with the value
        _scan(value, views)
        views.cut()

    def reduce(obj: Any) -> Any:
        return views.reduce(obj) if isinstance(obj, Tensor) else NotImplemented

    def reducer_override(self: Any, obj: Any) -> Any:
        inherited = getattr(super(kind, self), "reducer_override", lambda _: NotImplemented)
        return _first(reduce, inherited)(obj)

    kind = type(base.__name__, (base,), {"reducer_override": reducer_override})
    torch.save(value, file, pickle_module=SimpleNamespace(__name__="pickle", Pickler=kind, dump=pickle.dump))


def _scan(value: Any, views: Views) -> None:
    """Show each tensor in ``value`` to ``views``. Copies no data."""

    def reduce(obj: Any) -> Any:
        if isinstance(obj, (UntypedStorage, torch.TypedStorage)):
            return UntypedStorage, ()
        return views.reduce(obj) if isinstance(obj, Tensor) else NotImplemented

    pickler_of(pickle.Pickler, reduce, SimpleNamespace(write=len), lambda _: None).dump(value)
