"""The table of docs/coming_from/mmengine.md: every line runs, on one rank and on two."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import helpers
import ignite_dist as idist
from ignite_dist import spawn

_ROW = re.compile(r"^\| `(\w+)\(.*?\)` \| `(.*?)` \|", re.MULTILINE)
ROWS = _ROW.findall((helpers.ROOT / "docs" / "coming_from" / "mmengine.md").read_text(encoding="utf-8"))
# The public functions of mmengine.dist 0.10.
PUBLIC = """
    all_gather_object all_reduce all_gather all_reduce_dict collect_results collect_results_cpu
    collect_results_gpu gather broadcast gather_object sync_random_seed broadcast_object_list get_dist_info
    init_dist init_local_group get_backend get_world_size get_rank get_local_size get_local_group
    get_local_rank is_main_process master_only barrier is_distributed get_default_group allreduce_params
"""


def test_the_table_has_every_public_function() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(PUBLIC.split())


def _run_all(_: int) -> dict[str, Any]:
    """The results of all rows. The context exists, so the row of `initialize` is left out."""
    rank = idist.get_rank()
    loader = idist.auto_dataloader(TensorDataset(torch.arange(5)), batch_size=2, exact=True)
    results = [int(number) for (batch,) in loader for number in batch]
    found = {}
    for name, line in ROWS:
        values: dict[str, Any] = {
            "idist": idist,
            "data": torch.tensor([1.0, float(rank)]),
            "objects": ["of rank", rank],
            "metrics": {"loss": 1.0},
            "tensors": [torch.ones(2), torch.full((3,), float(rank))],
            "results": results,
            "loader": loader,
            "group": None,
            "dst": 0,
            "src": 0,
            "op": "SUM",
            "function": lambda: "called",
        }
        if name == "init_dist":
            assert line == "idist.initialize(backend)"
            continue
        found[name] = eval(line, values)
        if name == "allreduce_params":
            found[name] = values["tensors"]
    found["master_only"] = found["master_only"]()
    found["get_default_group"] = idist.all_reduce(1, group=found["get_default_group"])
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_line_of_the_table(world_size: int) -> None:
    by_rank = spawn("gloo", _run_all, nproc_per_node=world_size)
    total = float(sum(range(world_size)))
    for rank, found in enumerate(by_rank):
        assert found["all_reduce"].tolist() == [world_size, total]
        assert [row.tolist() for row in found["all_gather"]] == [[1.0, other] for other in range(world_size)]
        assert found["broadcast"].tolist() == [1.0, 0.0]
        assert found["broadcast_object_list"] == ["of rank", 0]
        assert found["all_reduce_dict"] == {"loss": world_size}
        assert len(found["all_gather_object"]) == world_size
        for name in ("collect_results", "collect_results_cpu", "collect_results_gpu"):
            assert found[name] == [0, 1, 2, 3, 4]
        assert [tensor.tolist() for tensor in found["allreduce_params"]] == [[world_size] * 2, [total] * 3]
        assert found["get_dist_info"] == (rank, world_size) == (found["get_rank"], found["get_world_size"])
        assert found["init_local_group"] == found["get_local_group"] == list(range(world_size))
        assert found["get_default_group"] == found["get_local_size"] == world_size
        assert (found["get_backend"], found["get_local_rank"]) == ("gloo", rank)
        assert found["is_main_process"] is (rank == 0) and found["is_distributed"] is (world_size > 1)
        assert found["master_only"] == (None if rank else "called")
        if rank:
            assert found["gather"] is None and found["gather_object"] is None
        else:
            assert found["gather"].tolist() == [[1.0, other] for other in range(world_size)]
            assert len(found["gather_object"]) == world_size
    assert len({found["sync_random_seed"] for found in by_rank}) == 1
