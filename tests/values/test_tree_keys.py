"""By which keys ranks pair the values of a dict: an order and names that are the same in every process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import timedelta
from enum import Enum, Flag, IntFlag
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ignite_dist.testing.conformance.enum_keys import Level, Other, Split
from ignite_dist.values import pytree


class Name(str, Enum):
    A = "a"
    B = "b"


class Access(Flag):
    READ = 1
    WRITE = 2


class Mode(IntFlag):
    R = 4
    W = 8


class Weight(float, Enum):
    HALF = 0.5


class Point(NamedTuple):
    x: int
    y: Any


class Text(str):
    """What compares as str does."""


class AnyCase(str):
    """What does not."""

    def __eq__(self, other: object) -> bool:
        return self.lower() == str(other).lower()

    def __hash__(self) -> int:
        return hash(self.lower())


class Identified(int):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def local_class() -> Any:
    class Local(Enum):
        X = 1

    return Local


# No two of them are equal.
KEYS: list[Any] = [
    *("", "a", "b", "é", "\ud800", "1", "True", "'", '"', "<", "(", "' .", "{ 'a'"),
    *(0, 1, 2, 10, -1, 10**30, -(10**30), 1 << 20_000, 4, 12),
    *(Split.TRAIN, Split.TEST, Other.Split.TRAIN, Weight.HALF),
    *(Access.READ, Access.READ | Access.WRITE),
    *((), (1,), (1, 2), (12,), ((1,), 2), (1, (2,)), ("a",), ("a", 1), (Split.TRAIN,), (Other.Split.TRAIN,)),
    *(("a b",), ("a", "b"), ("a' 'b",), (True, False), ("('a')",)),
]


def structure_of(value: Any) -> str:
    return pytree.flatten(value)[1]


def test_every_key_has_a_name_of_its_own() -> None:
    names = {structure_of({key: 1}) for key in KEYS}
    assert len(names) == len(KEYS)
    pairs = {structure_of({one: 1, other: 1}) for one in KEYS for other in KEYS if one is not other}
    assert len(pairs) == len(KEYS) * (len(KEYS) - 1) / 2


def test_the_order_does_not_depend_on_the_order_of_insertion() -> None:
    expected = pytree.flatten({key: position for position, key in enumerate(KEYS)})
    for seed in range(50):
        order = list(enumerate(KEYS))
        random.Random(seed).shuffle(order)
        shuffled = {key: position for position, key in order}
        assert pytree.flatten(shuffled) == expected
        assert pytree.rebuild(shuffled, iter(expected[0])) == shuffled
        assert list(pytree.rebuild(shuffled, iter(expected[0]))) == list(shuffled)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, Level.LOW),
        (12, Mode.R | Mode.W),
        ("a", Name.A),
        ("a", Text("a")),
        ("a", np.str_("a")),
        (1, np.int64(1)),
        (1, np.uint8(1)),
        (0, np.bool_(False)),
        ((1, 2), Point(1, 2)),
        ((1, "a"), (True, Name.A)),
        ((2, 3), torch.Size([2, 3])),
    ],
)
def test_keys_that_are_equal_pair_up(one: Any, other: Any) -> None:
    assert {one: 0} == {other: 0}, "or the case is wrong"
    others = {"z": 1, 7: 2, (7,): 3, Split.TEST: 4}
    assert pytree.flatten({one: 0, **others}) == pytree.flatten({**others, other: 0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "key",
    [
        *(None, 1.5, float("nan"), 1j, b"a", frozenset([1]), object(), int, timedelta(1)),
        *(np.float64(1), np.timedelta64(1, "s"), np.datetime64("2020-01-01")),
        *((1, None), ((1.5,),), torch.float32, torch.tensor(1), AnyCase("A"), Identified(1)),
    ],
    ids=lambda key: type(key).__name__,
)
def test_other_keys_are_a_type_error(key: Any) -> None:
    for value in ({key: 1}, {"a": [{"b": 1, key: 2}]}, {key: 1, 1: 2, "c": 3}):
        with pytest.raises(
            TypeError, match=r"str, int, bool, members of an enum, or tuples of these"
        ) as caught:
            pytree.flatten(value)
        assert type(key).__name__ in str(caught.value)


def test_classes_of_one_name_cannot_be_told_apart() -> None:
    one, other = local_class(), local_class()
    assert structure_of({one.X: 1}) == structure_of({other.X: 1})
    with pytest.raises(TypeError, match="have the same name"):
        pytree.flatten({one.X: 1, "a": 2, other.X: 3})
    with pytest.raises(TypeError, match="have the same name"):
        pytree.flatten({(1, one.X): 1, (1, other.X): 3})


def test_what_stays_on_one_rank_may_have_any_key() -> None:
    anything = object()
    value = {
        None: 1,
        1.5: 2,
        anything: 3,
        "a": 4,
        2: 5,
        1: 6,
        b"x": 7,
        local_class().X: 8,
        local_class().X: 9,
    }
    leaves, _ = pytree.flatten(value, is_local=True)
    assert sorted(leaves) == list(range(1, 10))
    assert pytree.rebuild(value, iter(leaves)) == value
    assert pytree.map_children(lambda leaf: -leaf, value) == {key: -leaf for key, leaf in value.items()}


_PROGRAM = """
import random, sys
sys.path[:0] = sys.argv[1:]
from ignite_dist.values import pytree
from test_tree_keys import KEYS
random.shuffle(KEYS)
print(pytree.flatten(dict.fromkeys(KEYS))[1].encode("utf-8", "backslashreplace"))
"""


@pytest.mark.long
def test_every_process_has_the_same_names_and_order() -> None:
    folder = Path(__file__).parent
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(folder), str(folder.parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=folder.parents[1],
            check=True,
            capture_output=True,
            timeout=200,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
