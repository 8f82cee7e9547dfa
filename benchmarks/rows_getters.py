"""The getters: local calls that a training loop makes often."""

from __future__ import annotations

import importlib.util
from functools import cache, partial

import torch
import torch.distributed as dist

import fresh
import ignite_dist as idist
from ignite_dist.comp_models import SerialModel
from ignite_dist.comp_models.work import Completed
from ignite_dist.diagnostics.announcing import announce, get_or_create_recorder
from ignite_dist.diagnostics.profiler.timed_calls import CallTimes
from rows import IGNITE, OURS, RAW, Bar, Contenders, LauncherRow, RankRow, Row, ignite_library
from timing import Effort, Samples

_GETTERS = ("get_rank", "get_world_size", "get_local_rank", "device")


def rows() -> list[Row]:
    horovod = "installed" if importlib.util.find_spec("horovod") else "not installed"
    return [
        *(
            RankRow(
                "getters in a gloo context",
                f"{name}()",
                "ns",
                (Bar("ratio", 0.5, label="dist.get_rank()"),),
                contenders=partial(_in_a_context, name),
            )
            for name in _GETTERS
        ),
        *(
            LauncherRow(
                f"getters, serial (Horovod {horovod})",
                f"{name}()",
                "ns",
                (Bar("value", 200),),
                measure=partial(_serial, name),
            )
            for name in _GETTERS
        ),
        *(
            RankRow(
                "cost of recording a collective's call",
                name,
                "ns",
                () if is_recorded else (Bar("value", 100),),
                contenders=partial(_announcing, is_recorded),
            )
            for name, is_recorded in {"no recorder": False, "the recorder keeps the last calls": True}.items()
        ),
        RankRow(
            "cost of recording a collective's call",
            "a timeline, with begin and end of the call",
            "ns",
            (Bar("value", 2000),),
            contenders=_in_a_timeline,
        ),
    ]


def _announcing(is_recorded: bool, device: torch.device) -> Contenders:
    model = SerialModel()
    if is_recorded:
        get_or_create_recorder(model, keep_calls=True)
    return {OURS: partial(announce, model, "all_reduce", model.groups.world, Completed, torch.ones(1), "SUM")}


def _in_a_timeline(device: torch.device) -> Contenders:
    model, tensor = SerialModel(), torch.ones(1)
    world = model.groups.world
    get_or_create_recorder(model, keep_calls=False).timelines[0] = CallTimes(10**9, lambda has_failed: None)
    return {OURS: lambda: announce(model, "all_reduce", world, Completed, tensor, "SUM")(world).wait()}


def _in_a_context(name: str, device: torch.device) -> Contenders:
    contenders = {OURS: getattr(idist, name), RAW: dist.get_rank}
    ignite = ignite_library()
    if ignite is not None:
        contenders[IGNITE] = getattr(ignite, name)
    return contenders


def _serial(name: str, effort: Effort) -> Samples:
    return {
        contender: samples[name] for contender, samples in _all_serial(max(1, effort.repeats // 2)).items()
    }


@cache
def _all_serial(repeats: int) -> dict[str, Samples]:
    # One process per library: pytorch-ignite imports an installed Horovod, and this row measures a process
    # without Horovod's import.
    measured: dict[str, Samples] = {}
    for _ in range(repeats):
        for contender, library in fresh.libraries():
            samples = fresh.run("getters", library, *_GETTERS)
            for name in _GETTERS:
                measured.setdefault(contender, {}).setdefault(name, []).extend(samples[name])
    return measured
