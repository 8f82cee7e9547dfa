"""Numpy arrays as tensors: which share memory, and which cannot become one."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest

from ignite_dist.values.arrays import fill_array, is_array, tensor_of

WHOLE = numpy.arange(6.0)
RECORDS = numpy.zeros(3, dtype=[("a", "i1"), ("b", "f8")])


@pytest.mark.parametrize(
    ("array", "is_shared"),
    [
        (WHOLE, True),
        (WHOLE.reshape(2, 3).T, True),
        (WHOLE[::2], True),
        (numpy.array(1.5), True),
        (numpy.zeros((0, 3)), False),
        (WHOLE[::-1], False),
        (WHOLE.astype(">f8"), False),
        (numpy.broadcast_to(numpy.ones(1), (3,)), False),  # read-only
        (RECORDS["b"], False),  # a stride of 9 bytes
    ],
)
def test_a_tensor_has_the_values_and_the_memory_where_torch_can_use_it(array: Any, is_shared: bool) -> None:
    before = array.tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_of(array)
    assert tensor.tolist() == before
    tensor += 1
    assert (array.tolist() != before) is is_shared
    if array.flags.writeable:
        assert fill_array(array, tensor) is array
        assert array.tolist() == tensor.tolist()


@pytest.mark.parametrize("array", [numpy.array(["a"]), numpy.array([None]), RECORDS])
def test_a_dtype_that_torch_does_not_have_is_refused(array: Any) -> None:
    with pytest.raises(TypeError, match="torch has no dtype for arrays of"):
        tensor_of(array)


def test_subclasses_of_arrays_are_no_arrays() -> None:
    assert is_array(WHOLE)
    assert not is_array(numpy.ma.array([1.0])) and not is_array([1.0]) and not is_array(numpy.float64(1))
