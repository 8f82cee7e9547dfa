"""Groups of ranks, and locks for work that one thread of a rank does for all its threads."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed import DeviceMesh

from ignite_dist.comp_models.transport import Group, Transport
from ignite_dist.comp_models.work import communicates
from ignite_dist.internals.arguments import as_int
from ignite_dist.values import meshes

_INTS = frozenset({int})


class Groups:
    """The groups of one context.

    Args:
        transport: makes the handles.
        world_size: number of ranks.
    """

    def __init__(self, transport: Transport, world_size: int) -> None:
        self._transport = transport
        self._world_size = world_size
        self._by_ranks: dict[tuple[int, ...], Group] = {}
        self.once = Once()
        self.world = Group(None, tuple(range(world_size)))
        self.is_joining = False
        """True inside ``uneven_inputs()``, where ranks make different numbers of steps."""

    @communicates
    def check_not_joining(self) -> None:
        """Raise inside ``uneven_inputs()``, before a call that all ranks would have to make.

        Raises:
            RuntimeError: called inside ``uneven_inputs()``.
        """
        if self.is_joining:
            raise RuntimeError(
                "In uneven_inputs() ranks make different numbers of steps, so a collective would wait for "
                "ranks that have left. Make collectives after the block."
            )

    @communicates
    def new(self, ranks: Sequence[int], **options: Any) -> Any:
        """Make a handle for ``ranks``. Without options, later calls with ``group=ranks`` use this handle."""
        checked = self._checked(ranks)
        handle = self._transport.make_group(checked, **options)
        if not options:
            self._by_ranks[checked] = Group(handle, checked)
        return handle

    @communicates
    def resolve(self, group: Any) -> Group:
        """The group of a ``group=`` argument.

        Args:
            group: None (the world), a list of global ranks, a handle, a ``DeviceMesh``, or the name of a
                dimension of the current mesh.

        Raises:
            ValueError: invalid or repeated ranks, a destroyed handle, an object that is not a group, or a
                name without a mesh.
            RuntimeError: called inside ``uneven_inputs()``.
        """
        if self.is_joining:
            self.check_not_joining()
        if group is None:
            return self.world
        if not isinstance(group, (list, tuple, range)):
            return self._of_handle(group)
        key = tuple(group)
        if not _INTS.issuperset(map(type, key)):  # floats and bools may equal a key
            key = self._checked(key)
        found = self._by_ranks.get(key)
        if found is not None and (found.handle is None or self._transport.is_alive(found.handle)):
            return found
        checked = self._checked(key)
        if checked != key:  # the keys are ascending ranks: the order in the user's list does not matter
            return self.resolve(checked)
        if len(checked) == self._world_size:
            self._by_ranks[key] = self.world
            return self.world
        with self.once("the group", key):
            made = self._by_ranks.get(key)
            if made is None or made is found:  # else another thread has made the group
                made = self._by_ranks[key] = Group(self._transport.make_group(checked), checked)
            return made

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        """The global ranks of a ``group=`` argument, ascending. Makes no group, so it never communicates.

        Raises:
            ValueError: as in :meth:`resolve`.
        """
        if group is None:
            return self.world.ranks
        group = self._without_mesh(group)
        if isinstance(group, (list, tuple, range)):
            return self._checked(group)
        return self._transport.ranks_of(group)

    def of_mesh(self, mesh: DeviceMesh, dimensions: Collection[int]) -> Group:
        """This rank's group along ``dimensions`` of ``mesh``. The members call this method.

        Raises:
            ValueError: the backend has no meshes, or ``mesh`` belongs to another context.
        """
        return self.resolve(self._transport.group_of_mesh(mesh, dimensions))

    def forget(self) -> None:
        """Drop all handles, because the context has ended."""
        self._by_ranks.clear()

    def _of_handle(self, handle: Any) -> Group:
        plain = self._without_mesh(handle)
        return Group(handle, self._transport.ranks_of(handle)) if plain is handle else self.resolve(plain)

    def _without_mesh(self, group: Any) -> Any:
        """The handle or the ranks of a mesh, or of a dimension's name; other values are unchanged."""
        if DeviceMesh in type(group).__mro__:  # isinstance() takes a microsecond, because of its metaclass
            return self._transport.group_of_mesh(group, range(group.ndim))
        if isinstance(group, str):
            mesh, dimension = meshes.named(group)
            return self._transport.group_of_mesh(mesh, [dimension])
        return group

    def _checked(self, ranks: Sequence[int]) -> tuple[int, ...]:
        world_size = self._world_size
        try:
            plain = [as_int(rank) for rank in ranks]
        except TypeError:  # not iterable
            plain = [None]
        if not _INTS.issuperset(map(type, plain)):
            raise ValueError(f"Ranks of a group are a list of ints, got {ranks!r}.")
        checked = tuple(sorted(plain))
        if not checked:
            return checked
        if len(set(checked)) != len(checked) or checked[0] < 0 or checked[-1] >= world_size:
            raise ValueError(
                f"Ranks of a group are distinct and in [0, world_size={world_size}), got {list(ranks)}."
            )
        return checked


class _OwnedLock:
    """A lock, and the thread that holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may run before `thread` is set
        self.thread: int | None = None


class Once:
    """Locks for work that one thread of a rank does while the rank's other threads wait for the result."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, _OwnedLock] = {}

    @contextmanager
    def __call__(self, what: str, key: Hashable) -> Iterator[None]:
        """Context manager: hold the lock for ``what`` and ``key``. The block may wait for other ranks.

        Raises:
            RuntimeError: this thread already holds the lock, because a signal handler or ``__del__`` has
                interrupted the block. The handler cannot wait for the interrupted code.
        """
        owned = self._locks.setdefault((what, key), _OwnedLock())
        if owned.thread == threading.get_ident():
            raise RuntimeError(
                f"A signal handler or __del__ has interrupted the first use of {what} "
                f"{list(key) if isinstance(key, tuple) else ''}, and needs {what}, too. Use {what} once "
                "before the handler can run."
            )
        with owned.lock:
            owned.thread = threading.get_ident()
            try:
                yield
            finally:
                owned.thread = None

    def forget(self) -> None:
        """Drop all locks. In a forked child, the thread that held a lock does not exist."""
        self._locks.clear()
