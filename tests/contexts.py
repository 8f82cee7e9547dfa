"""What a process says of its context, and the variables of ranks that a test starts."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any

import ignite_dist as idist

SHORT = timedelta(seconds=45)  # so that a test fails before its ranks have waited for half an hour


def facts() -> dict[str, Any]:
    """What the facade says about this process without asking anybody."""
    return {
        "model": idist.model_name(),
        "backend": idist.backend(),
        "rank": idist.get_rank(),
        "world size": idist.get_world_size(),
        "local rank": idist.get_local_rank(),
        "device": idist.device(),
    }


def topology() -> tuple[int, int, int, int]:
    return idist.get_local_rank(), idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank()


def my_rank() -> int:
    return int(os.environ["TEST_RANK"])


def by_test_rank(world_size: int = 2, **more: str) -> list[dict[str, str]]:
    """Environments in which nothing but a name of ours tells the rank."""
    return [{"TEST_RANK": str(rank), **more} for rank in range(world_size)]


def messages_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught]
