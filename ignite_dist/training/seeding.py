"""Random numbers: a shared seed, and generators that differ by rank."""

from __future__ import annotations

import random
import secrets
import sys
from operator import index
from typing import Any

from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import Group
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.context.live import current_model
from ignite_dist.values.random_states import SEED_BITS, remember_seed, seed_of_rank

_SHARED_BITS = 32


@counts_interrupts
def shared_seed(group: Any = None) -> int:
    """A new random seed in [0, 2**32), the same on every rank of a group. Every rank of it calls this.

    The group's first rank reads the seed from the operating system, so no generator's state changes.
    ``numpy.random.seed`` accepts at most 32 bits.

    Args:
        group: as in :func:`all_reduce`. A rank outside the group gets a seed of its own.

    Raises:
        ValueError: ``group`` is not a group. Nothing was sent.
    """
    model = current_model()
    members = model.groups.resolve(group)
    own_seed = secrets.randbits(_SHARED_BITS)

    def begin(members: Group) -> Work:
        return Steps(lambda: model.objects.broadcast(own_seed, members.ranks[0], members))

    seed: int = perform(model, "shared_seed", members, begin, outside=own_seed)
    return seed


def seed_everything(seed: int | None = None, per_rank: bool = True) -> int:
    """Seed Python's ``random``, numpy if it is imported, and torch on the CPU and on this rank's devices.

    The same seed, world size and rank give the same numbers. torch seeds data loader workers from this
    rank's generator, so their numbers differ by rank too. So do those of an ``auto_dataloader`` with
    ``generator=``, also with ``per_rank=False``. Rank 0 draws the same numbers as one process.

    Args:
        seed: in [0, 2**63), the same on every rank. None uses a :func:`shared_seed`; every rank must then
            call this.
        per_rank: False makes all ranks draw the same numbers, to initialise a model for example.

    Returns:
        The seed. A run with this value as ``seed`` draws the same numbers.

    Raises:
        ValueError: ``seed`` is out of range.
        RuntimeError: ``per_rank=True`` on XLA replicas that are threads of one process: the threads share a
            random state. Use a ``torch.Generator`` per rank instead.
    """
    model = current_model()
    if seed is not None:
        seed = _checked_seed(seed)
    shares_state = model.ranks_in_process() > 1
    if per_rank and shares_state:
        raise RuntimeError(
            f"This process runs {model.ranks_in_process()} ranks as threads, which share one random state. "
            "Draw from torch.Generator().manual_seed(seed + idist.get_rank()) where ranks should differ, and "
            "call seed_everything(seed, per_rank=False) for all other random numbers."
        )
    if seed is None:
        seed = shared_seed()
    remember_seed(seed)
    rank_seed = seed_of_rank(seed, model.get_rank()) if per_rank else seed
    random.seed(rank_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank_seed % (1 << 32))
    model.training.seed(rank_seed)
    if shares_state:  # no rank may draw before the last rank has seeded the shared state
        model.transport.barrier(model.groups.world).wait()
    return seed


def _checked_seed(seed: Any) -> int:
    if not isinstance(seed, bool) and hasattr(seed, "__index__") and 0 <= index(seed) < 1 << SEED_BITS:
        return index(seed)
    raise ValueError(f"seed must be an int in [0, 2**{SEED_BITS}), got {seed!r}.")
