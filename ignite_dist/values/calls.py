"""What a user has called, as the ranks of a group compare it."""

from __future__ import annotations

import itertools
import threading
import zlib
from functools import lru_cache
from typing import Any

from torch import Tensor

from ignite_dist.values.layouts import describe_layout

_MAX_CALLS = 1024


class Call:
    """A function with all arguments that must be equal on all ranks.

    Args:
        text: describes the call, for example ``"all_reduce(SUM torch.float32 (3,))"``.

    Attributes:
        checksum: of the text, 32 bits.
    """

    __slots__ = ("checksum", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.checksum = zlib.crc32(text.encode())


NO_CALL = Call("")
"""Stands for the call of a collective that no public function has named."""


class _WholeCall(threading.local):
    """The call that a thread is in if all collectives of a public function are one call.

    Attributes:
        token: as in :class:`~ignite_dist.comp_models.Group`; 0 outside of such functions.
    """

    token = 0


whole_call = _WholeCall()
_tokens = itertools.count(1)


def own_token() -> int:
    """A new token, also in a function whose collectives are one call."""
    return next(_tokens)


def new_token() -> int:
    """The token of the next call of this thread."""
    return whole_call.token or next(_tokens)


def call_of(function: str, op: str, value: Any) -> Call:
    """The call of ``function``, cached.

    Args:
        function: the name of the public function.
        op: the reduction, the source or the destination, and options.
        value: a tensor, or a description. A dtype and the leaves of a tree are not in the call, and ``op``
            then neither: the function compares them itself, and its error names more.
    """
    if isinstance(value, Tensor):
        return _call(function, op, (value.dtype, value.shape))
    return _call(function, op, value) if isinstance(value, str) else _call(function, "", "")


@lru_cache(maxsize=_MAX_CALLS)
def _call(function: str, op: str, layout: Any) -> Call:
    return Call(f"{function}({' '.join(filter(None, (op, describe_layout(layout))))})")
