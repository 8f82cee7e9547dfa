"""What cannot be sent to a worker is named, in one error, before a worker starts."""

from __future__ import annotations

import re
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import ignite_dist as idist
from spawned import spawn

METHODS = [pytest.param("spawn", marks=pytest.mark.long), "forkserver"]
LOCK = "cannot pickle '_thread.lock' object"


def train(local_rank: int, *args: Any, **kwargs: Any) -> str:
    return " ".join(type(value).__name__ for value in (*args, *kwargs.values()))


class Holder:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def train(self, local_rank: int) -> None: ...


class Refuses:
    def __reduce__(self) -> Any:
        raise LookupError("no such table")


class RefusesItsState:
    def __getstate__(self) -> Any:
        raise TypeError("is connected")


class WithoutText:
    def __reduce__(self) -> Any:
        raise LookupError

    __repr__ = __reduce__


def _closure() -> Callable[[int], bool]:
    lock = {"held": threading.Lock()}
    return lambda local_rank: lock["held"].locked()


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle += [circle, Holder(me=circle, locks=(1, threading.Lock()))]
    return circle


CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "argument": ((train, (threading.Lock(),)), f"Argument 1 of train cannot be sent to a worker: {LOCK}."),
    "second": ((train, (1, threading.Lock())), f"Argument 2 of train cannot be sent to a worker: {LOCK}."),
    "keyword": (
        (train, (), {"a": 1, "lock": threading.Lock()}),
        f"Argument 'lock' of train cannot be sent to a worker: {LOCK}.",
    ),
    "function": ((_closure(),), f"The function <lambda> .*: {LOCK}. Found in it: lock\\['held'\\]."),
    "method": ((Holder(lock=threading.Lock()).train,), f"The function train .*: {LOCK}. .*: __self__.lock."),
    "deep": (
        (train, ({"x": [0, Holder(y=(threading.Lock(),))]},)),
        f"Argument 1 of train .*: {LOCK}. Found in it: \\['x'\\]\\[1\\].y\\[0\\].",
    ),
    "circle": ((train, (_circle(),)), f"Argument 1 .*: {LOCK}. Found in it: \\[1\\].locks\\[1\\]."),
    "generator": (
        (train, ((one for one in ()),)),
        "Argument 1 of train .*: cannot pickle 'generator' object.",
    ),
    "file": ((train, (Path("/dev/null").open("w"),)), "Argument 1 of train .*: .*pickle files .*."),  # noqa: SIM115
    "reduce": (
        (train, (Refuses(),)),
        r"Argument 1 of train .*: LookupError: no such table \(workers/test_unsent_parts.py:\d+\).",
    ),
    "getstate": (
        (train, (), {"connection": [RefusesItsState()]}),
        r"Argument 'connection' of train .*: is connected \(.*\). Found in it: \[0\].",
    ),
    "without text": ((train, ({WithoutText(): 1},)), r"Argument 1 of train .*: LookupError: no text \(.*\)."),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", CALLS)
def test_one_error_names_what_cannot_be_sent(what: str, method: str) -> None:
    call, expected = CALLS[what]
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(TypeError) as caught:
        idist.spawn("gloo", *call, nproc_per_node=2, start_method=method)
    assert set(psutil.Process().children(recursive=True)) - children <= _servers()
    assert re.fullmatch(f"{expected} Send the underlying data instead.", str(caught.value)), caught.value
    shown = "".join(traceback.format_exception(caught.value))
    is_of_user = what in ("reduce", "getstate", "without text")
    assert shown.count("Traceback (most recent call last)") == 1 + is_of_user, shown


def _servers() -> set[psutil.Process]:
    """The fork server and the resource tracker, which are no workers."""
    children = psutil.Process().children()
    return {one for one in children if re.search("forkserver|resource_tracker", " ".join(one.cmdline()))}


def test_a_fork_needs_no_pickle() -> None:
    args = (threading.Lock(), Refuses(), (one for one in ()))
    assert spawn(train, *args, start_method="fork", nproc_per_node=1) == ["lock Refuses generator"]


def test_a_socket_is_shared() -> None:
    with socket.socket() as connection:
        assert spawn(train, connection, nproc_per_node=1) == ["socket"]
