from __future__ import annotations

import math
import pickle
import threading
from typing import Any

import pytest
import torch

from ignite_dist import wire


class Stubborn:
    def __reduce__(self) -> Any:
        raise OSError("I stay here")


def module_function(x: int) -> int:
    return x + 1


@pytest.mark.parametrize(
    "value",
    [None, 0, 2**200, math.inf, "", "grüße, 世界 🎉", b"\0\xff", {"a": [1, (2.5,)]}, float, module_function],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert wire.decode(wire.encode(value)) == value
    assert wire.decode(memoryview(wire.encode_by_value(value))) == value


def test_tensors_inside_of_an_object_come_back_equal() -> None:
    value = {"x": torch.arange(6).view(2, 3).t(), "empty": torch.empty(0, 3)}
    copy = wire.decode(wire.encode(value))
    assert torch.equal(copy["x"], value["x"])
    assert copy["empty"].shape == (0, 3)


def test_lambdas_and_closures_go_by_value() -> None:
    captured = [1, 2]
    assert wire.decode(wire.encode(lambda x: x + sum(captured)))(10) == 13


def test_what_plain_pickle_can_send_goes_by_reference() -> None:
    payload = wire.encode(module_function)
    assert payload == pickle.dumps(module_function, protocol=pickle.HIGHEST_PROTOCOL)


@pytest.mark.parametrize("value", [threading.Lock(), Stubborn(), [Stubborn()], (i for i in ())])
def test_what_cannot_be_sent_is_a_type_error_that_names_it(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process") as info:
        wire.encode(value)
    assert type(value).__qualname__ in str(info.value)
    assert info.value.__cause__ is not None


@pytest.mark.parametrize("size", [0, 1, wire.INLINE_BYTES - 1, wire.INLINE_BYTES])
def test_a_small_payload_travels_in_the_header(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    header = wire.write_header(payload)
    assert len(header) == wire.HEADER_BYTES
    length, inline = wire.read_header(memoryview(header))
    assert inline is not None
    assert (length, bytes(inline)) == (size, payload)


@pytest.mark.parametrize("size", [wire.INLINE_BYTES + 1, wire.HEADER_BYTES, 10_000])
def test_of_a_large_payload_the_header_says_the_length(size: int) -> None:
    header = wire.write_header(bytes(size))
    assert len(header) == wire.HEADER_BYTES
    assert wire.read_header(memoryview(header)) == (size, None)


def test_a_dict_of_twenty_numbers_fits_the_header() -> None:
    numbers = {f"metric_{i}": i if i % 2 else i / 3 for i in range(20)}
    assert len(wire.encode(numbers)) <= wire.INLINE_BYTES


def test_as_tensor_is_the_buffer_itself() -> None:
    buffer = bytearray(b"abc")
    tensor = wire.as_tensor(buffer)
    tensor[0] = ord("x")
    buffer[1] = ord("y")
    assert buffer == b"xyc"
    assert bytes(tensor.tolist()) == b"xyc"
    assert wire.as_tensor(bytearray()).shape == (0,)
