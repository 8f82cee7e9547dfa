"""Numbers and ports as ``argparse``, the environment and numpy have them, where processes are started."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ignite_dist as idist
from helpers import free_port


def _where(_: int) -> tuple[int, int, str]:
    import os

    return idist.get_rank(), idist.get_world_size(), os.environ["MASTER_PORT"]


def test_a_port_may_be_a_text_and_numbers_may_be_numpys() -> None:
    for as_text in (True, False):
        port = free_port()
        given = {"master_port": str(port) if as_text else np.int32(port), "nnodes": np.int64(1)}
        found = idist.spawn("gloo", _where, nproc_per_node=np.int64(2), node_rank=np.uint8(0), **given)  # type: ignore[arg-type]
        assert found == [(0, 2, str(port)), (1, 2, str(port))]


def test_parallel_takes_them_too() -> None:
    port = free_port()
    given: dict[str, Any] = {"nnodes": np.int64(1), "node_rank": np.int64(0), "master_port": str(port)}
    with idist.Parallel("gloo", nproc_per_node=np.int64(1), **given) as parallel:  # type: ignore[arg-type]
        assert parallel.run(_where) == (0, 1, str(port))
    # Looked at when it is made, and started on another day.
    idist.Parallel("gloo", 2, 3, np.int64(1), "10.0.0.1", "3344")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("master_port", value)
            for value in ("", "x", "-1", "65536", "99999", " 1", "1.0", "\u0663", 1.0, True)
        ),
        *(("node_rank", value) for value in (0.0, "0", True, np.bool_(True), np.float64(0))),
        *(("nproc_per_node", value) for value in (1.0, "1", True, np.float32(1), np.bool_(True))),
        *(("nnodes", value) for value in (1.0, "1", True, np.float32(1))),
    ],
)
def test_what_is_none_is_refused_before_anything_is_started(name: str, value: Any) -> None:
    given = {"nproc_per_node": 1, name: value}
    with pytest.raises(ValueError, match=name):
        idist.spawn("gloo", _where, **given)
    with pytest.raises(ValueError, match=name):
        idist.Parallel("gloo", **given)


def test_ranks_of_initialize(tmp_path: Any) -> None:
    for rank, world_size in ((0.0, 1), ("0", 1), (False, True), (0, np.float64(1))):
        with pytest.raises(ValueError, match="must be an int"):
            idist.initialize("gloo", init_method=f"file://{tmp_path}/a", rank=rank, world_size=world_size)
    idist.initialize("gloo", init_method=f"file://{tmp_path}/b", rank=np.int64(0), world_size=np.int64(1))
    assert (idist.get_rank(), idist.get_world_size()) == (0, 1)
    idist.finalize()
