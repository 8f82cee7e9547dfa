"""The states of this process's random generators, also as plain values, which ``weights_only`` can load."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEED_BITS = 63

# The process has one global random state, and replicas of XLA may be threads of the process.
_lock = threading.RLock()
_latest_seed = 0


def remember_seed(seed: int) -> None:
    """Let :func:`latest_seed` return ``seed``, with which ``seed_everything`` has seeded the generators."""
    global _latest_seed
    _latest_seed = seed


def latest_seed() -> int:
    """The seed of the last ``seed_everything`` of this process, 0 before it."""
    return _latest_seed


def seed_of_rank(seed: int, rank: int) -> int:
    """A seed for ``rank``. With ``seed + rank`` the runs of two neighbouring seeds would share numbers."""
    if rank == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


class RandomStates(NamedTuple):
    """The states of torch's CPU generator, ``random``, and ``numpy.random`` if numpy is imported.

    Another bit generator than numpy's default is left out.
    """

    torch: Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None

    @classmethod
    def now(cls) -> RandomStates:
        """The present states."""
        numpy: Any = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state(legacy=False)
        if state is not None and state["bit_generator"] != "MT19937":
            state = None
        return cls(torch.get_rng_state(), random.getstate(), state)

    def restore(self) -> None:
        """Set the generators to these states. numpy's is set if numpy is imported."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)

    def plain(self) -> dict[str, Any]:
        """A dict of tensors, numbers and strings."""
        version, words, gauss = self.python
        states = {
            "torch": self.torch,
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        }
        if self.numpy is not None:
            states["numpy"] = {
                "words": torch.tensor(self.numpy["state"]["key"].tolist()),
                "position": int(self.numpy["state"]["pos"]),
                "has_gauss": int(self.numpy["has_gauss"]),
                "gauss": float(self.numpy["gauss"]),
            }
        return states

    @classmethod
    def of_plain(cls, states: dict[str, Any]) -> RandomStates:
        """The inverse of :meth:`plain`."""
        python, saved = states["python"], states.get("numpy")
        numpy: Any = sys.modules.get("numpy")
        state = None
        if numpy is not None and saved is not None:
            key = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
            state = {"bit_generator": "MT19937", "state": {"key": key, "pos": saved["position"]}}
            state.update(has_gauss=saved["has_gauss"], gauss=saved["gauss"])
        words = tuple(python["words"].tolist())
        return cls(states["torch"], (python["version"], words, python["gauss"]), state)


class GeneratorStates:
    """The present states of the process's random generators, and of ``others``.

    ``others``: generators of torch, Python or numpy.
    """

    def __init__(self, others: Sequence[Any] = ()) -> None:
        self._of_process, self._others = RandomStates.now(), others
        self._states = list(map(_state_of, others))

    def restore(self) -> None:
        """Set all of them to these states."""
        self._of_process.restore()
        for generator, state in zip(self._others, self._states, strict=True):
            _set_state(generator, state)


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def own_generators(owner: Any) -> list[Any]:
    """The random generators that are attributes of ``owner``, or in lists and dicts that are."""
    numpy: Any = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    slots = [name for one in type(owner).__mro__ for name in vars(one).get("__slots__", ())]
    found: list[Any] = []
    for value in (*getattr(owner, "__dict__", {}).values(), *(getattr(owner, name, None) for name in slots)):
        items = value if type(value) in (list, tuple) else value.values() if type(value) is dict else [value]
        found += [one for one in items if isinstance(one, kinds) and not isinstance(one, random.SystemRandom)]
    return found


def seed_generators(seed: int, others: Sequence[Any] = ()) -> None:
    """Seed the global generators of torch's CPU, Python and numpy, and ``others``."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numpy.random.get_state(legacy=False)["bit_generator"] == "MT19937":
        numpy.random.seed(seed % (1 << 32))
    for generator in others:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:  # random.Random and numpy's RandomState
            generator.seed(seed % (1 << 32))


@contextmanager
def preserved(others: Sequence[Any] = ()) -> Iterator[None]:
    """Restore all states after the block. No other rank of this process changes them in the block."""
    with _lock:
        states = GeneratorStates(others)
        try:
            yield
        finally:
            states.restore()
