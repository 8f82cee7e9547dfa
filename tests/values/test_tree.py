from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest

from ignite_dist.values import pytree


class Point(NamedTuple):
    x: Any
    y: Any


class Metrics(dict[str, Any]):
    """A dict of somebody's own, which carries more than its items."""

    unit = "none"


class Row(list[Any]):
    pass


TREES = [
    {"b": 1, "a": [2, (3, 4)], "c": {}},
    [],
    (),
    (1,),
    [[1], [[2]], ()],
    Point(1, Point([2], {"k": 3})),
    OrderedDict([("z", 1), ("a", 2)]),
    Counter({"hits": 3, "misses": 1}),
    Metrics(a=1, b=Row([2, 3])),
    {1: "one", "1": "text", (2, 3): "tuple", False: "no"},
]


def leaves_of(value: Any) -> list[Any]:
    return pytree.flatten(value)[0]


@pytest.mark.parametrize("value", TREES, ids=repr)
def test_a_tree_rebuilt_from_its_own_leaves_is_equal_and_of_the_same_types(value: Any) -> None:
    copy = pytree.rebuild(value, iter(leaves_of(value)))
    assert copy == value
    assert repr(copy) == repr(value)  # the order of a dict's items too
    assert type(copy) is type(value)
    assert copy is not value or value == ()


def test_rebuild_takes_new_leaves_and_leaves_the_original_alone() -> None:
    value = {"b": 1, "a": [2, 3]}
    numbers = [10 * leaf for leaf in leaves_of(value)]
    assert pytree.rebuild(value, iter(numbers)) == {"b": 10, "a": [20, 30]}
    assert value == {"b": 1, "a": [2, 3]}


def test_counts_are_replaced_not_added() -> None:
    assert pytree.rebuild(Counter(a=1, b=2), iter([10, 20])) == Counter(a=10, b=20)


def test_a_default_factory_is_kept() -> None:
    copy = pytree.rebuild(defaultdict(list, a=1), iter([2]))
    assert copy == {"a": 2}
    assert copy["missing"] == []


def test_the_attributes_of_a_dict_of_ones_own_are_kept() -> None:
    value = Metrics(a=1)
    value.unit = "seconds"
    copy = pytree.rebuild(value, iter([2]))
    assert (type(copy), dict(copy), copy.unit) == (Metrics, {"a": 2}, "seconds")


def test_leaves_come_in_one_order_whatever_the_order_of_insertion() -> None:
    for one in ({"b": 1, "a": 2}, {"b": 1, "a": 2, 3: 3, (1, 2): 5}):
        other = dict(reversed(one.items()))
        assert pytree.flatten(one) == pytree.flatten(other)
        copy = pytree.rebuild(other, iter(leaves_of(one)))
        assert copy == one
        assert list(copy) == list(other)


@pytest.mark.parametrize("leaf", [1, "text", None, b"bytes", {1, 2}, 1.5])
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    assert leaves_of(leaf) == [leaf]
    assert pytree.rebuild(leaf, iter(["new"])) == "new"


def structure_of(value: Any) -> str:
    return pytree.flatten(value)[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 5, "a": 7}),
        ([1, 2], (3, 4)),  # they pair up
        ([1, 2], Point(3, 4)),
        ({"a": 1}, OrderedDict(a=2)),
        (1, "text"),  # what a leaf is does not matter
    ],
)
def test_structures_of_trees_that_pair_up_are_equal(one: Any, other: Any) -> None:
    assert structure_of(one) == structure_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({1: 1}, {"1": 1}),
        ({0: 1, 1: 2}, [1, 2]),
        ([1, 2], [1, 2, 3]),
        ([1, [2, 3]], [[1, 2], 3]),
        ([[], [1]], [[1], []]),
        ({"a:int,'b'": 1}, {"a": 1, "b": 1}),
        (1, [1]),
        ({"' . 'b'": 1}, {"": 1, "b": 1}),
        ({"a": {}}, {"a": []}),
        ({"a": [1], "b": 2}, {"a": [1, 2], "b": {}}),
        ({}, []),
    ],
)
def test_structures_of_trees_that_do_not_pair_up_differ(one: Any, other: Any) -> None:
    assert structure_of(one) != structure_of(other)
