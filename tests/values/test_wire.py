from __future__ import annotations

import enum
import math
import os
import pickle
import subprocess
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
import torch

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError, EnvironmentVariablesError, UnsafeObjectError
from ignite_dist.testing.conformance.cases import safe_mode
from ignite_dist.values import message_header, safe_objects, serialization

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
    ),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex32, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


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
    assert serialization.decode(serialization.encode(value)) == value
    assert serialization.decode(memoryview(serialization.encode_by_value(value))) == value


def test_tensors_inside_of_an_object_come_back_equal() -> None:
    value = {"x": torch.arange(6).view(2, 3).t(), "empty": torch.empty(0, 3)}
    copy = serialization.decode(serialization.encode(value))
    assert torch.equal(copy["x"], value["x"])
    assert copy["empty"].shape == (0, 3)


def test_lambdas_and_closures_go_by_value() -> None:
    captured = [1, 2]
    assert serialization.decode(serialization.encode(lambda x: x + sum(captured)))(10) == 13


def test_what_plain_pickle_can_send_goes_by_reference() -> None:
    payload = serialization.encode(module_function)
    assert payload == pickle.dumps(module_function, protocol=pickle.HIGHEST_PROTOCOL)


@pytest.mark.parametrize("value", [threading.Lock(), Stubborn(), [Stubborn()], (i for i in ())])
def test_what_cannot_be_sent_is_a_type_error_that_names_it(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process") as info:
        serialization.encode(value)
    assert type(value).__qualname__ in str(info.value)
    assert info.value.__cause__ is not None


@pytest.mark.parametrize("size", [0, 1, message_header.INLINE_BYTES - 1, message_header.INLINE_BYTES])
def test_a_small_payload_travels_in_the_header(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    header = message_header.write_header(payload)
    assert len(header) == message_header.HEADER_BYTES
    length, inline = message_header.read_header(memoryview(header), rank=1)
    assert inline is not None
    assert (length, bytes(inline)) == (size, payload)


@pytest.mark.parametrize("size", [message_header.INLINE_BYTES + 1, message_header.HEADER_BYTES, 10_000])
def test_of_a_large_payload_the_header_says_the_length(size: int) -> None:
    header = message_header.write_header(bytes(size))
    assert len(header) == message_header.HEADER_BYTES
    assert message_header.read_header(memoryview(header), rank=1) == (size, None)


def test_a_dict_of_twenty_numbers_fits_the_header() -> None:
    numbers = {f"metric_{i}": i if i % 2 else i / 3 for i in range(20)}
    assert len(serialization.encode(numbers)) <= message_header.INLINE_BYTES


def test_as_tensor_is_the_buffer_itself() -> None:
    buffer = bytearray(b"abc")
    tensor = serialization.as_tensor(buffer)
    tensor[0] = ord("x")
    buffer[1] = ord("y")
    assert buffer == b"xyc"
    assert bytes(tensor.tolist()) == b"xyc"
    assert serialization.as_tensor(bytearray()).shape == (0,)


@pytest.mark.parametrize("position", [0, 3, 4, 8, 16, 16 + 9])
def test_a_header_that_changed_on_the_way_is_no_header(position: int) -> None:
    header = message_header.write_header(b"0123456789")
    header[position] ^= 1
    with pytest.raises(CollectiveMismatchError, match="rank 3"):
        message_header.read_header(memoryview(header), rank=3)


# --- safe objects ------------------------------------------------------------------------------------


@dataclass
class Score:
    value: float
    tags: list[str]


class Point(NamedTuple):
    x: int
    y: Any


class Color(enum.Enum):
    RED = 1


class Runs:
    """Makes a directory when plain pickle reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


SAFE: list[Any] = [
    *(None, True, False, 0, -1, 2**31, -(2**63), 2**2039, 2**2040, -(10**3000), 1.5, -math.inf, 2.5j),
    *("", "grüße, 世界 🎉", "\udc80", "\x8b" * 300, b"", b"\0\xff", bytes(range(256)) * 9, bytearray(b"abc")),
    *([], [1, [2]], (), (1,), (1, 2, 3, 4), {}, {"a": {1: (None,)}}, set(), {1, 2}, frozenset({"x"})),
    {10**1000: [10**999, {"large": -(10**1000)}]},
    *(range(1, 9, 3), slice(None, 3), OrderedDict(b=1, a=2), Counter("abca"), deque("ab", 3)),
    *(defaultdict(list, {1: [2]}), defaultdict(None, {1: 2})),
    *(Path("/some/where"), PurePosixPath("x"), PureWindowsPath("c:/x"), uuid.UUID(int=7)),
    datetime(2026, 2, 3, 4, 5, 6, 7, timezone(timedelta(hours=-3))),
    *(datetime(1, 1, 1), date(2026, 2, 3), time(4, 5, 6, 7), timedelta(-1, 2, 3)),
    *(Decimal("1.10"), Fraction(-1, 3), torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), int),
]


@pytest.mark.parametrize("value", SAFE, ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_plain_values_are_safe_without_being_registered(value: Any) -> None:
    with safe_mode():
        copy = serialization.unpack(memoryview(serialization.pack(value)), rank=1)
    assert copy == value
    assert type(copy) is type(value)


def test_a_defaultdict_goes_on_filling_itself() -> None:
    with safe_mode():
        copy = serialization.unpack(serialization.pack(defaultdict(list, {1: [2]})), rank=1)
    assert copy[5] == []


@pytest.mark.parametrize("other", [1, 139, 2**3000], ids=["small", "the code of a huge one", "huge"])
def test_what_is_shared_in_an_object_stays_shared(other: int) -> None:
    shared: list[Any] = [other]
    shared.append(shared)
    with safe_mode():
        first, second = serialization.unpack(serialization.pack((shared, shared)), rank=1)
    assert first is second
    assert first[1] is first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_safe(dtype: torch.dtype) -> None:
    tensor = torch.arange(96, dtype=torch.uint8).view(dtype).view(2, -1).t()
    with safe_mode():
        copy = serialization.unpack(serialization.pack({"tensor": tensor}), rank=1)["tensor"]
    assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(copy.t().view(torch.uint8), tensor.t().view(torch.uint8))


def test_parameters_and_tensors_that_share_their_memory() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    with safe_mode():
        copy, row = serialization.unpack(serialization.pack([weight, weight.detach()[1]]), rank=1)
    assert type(copy) is torch.nn.Parameter and copy.requires_grad
    assert torch.equal(copy, weight)
    assert row.data_ptr() == copy[1].data_ptr()


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", ">i4", "u8", "f2", "f8", "c16", "S5", "U7", "M8[s]", "V3", [("a", "i4"), ("b", "f8", (2,))]],
)
def test_numpys_arrays_and_scalars_are_safe(dtype: Any) -> None:
    numpy = pytest.importorskip("numpy")
    size = 750 * numpy.dtype(dtype).itemsize
    memory = bytearray(
        b"".join(bytes([number % (2 if dtype == "?" else 97), 0, 0, 0]) for number in range(size))
    )
    large = numpy.ndarray((3, 1000), dtype, memory)
    for array in (
        large,
        large[:, :4],
        large.T,
        large[:, ::7],
        large[:0],
        large[0, 0],
        large[0, :1].reshape(()),
    ):
        with safe_mode():
            copy = serialization.unpack(serialization.pack([array]), rank=1)[0]
        assert type(copy) is type(array)
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        assert numpy.array_equal(copy, array)
        if isinstance(copy, numpy.ndarray) and copy.dtype.kind == "f":
            copy[...] = 0  # it can be written to


def test_numpys_arrays_of_objects_are_refused_where_they_are_sent() -> None:
    numpy = pytest.importorskip("numpy")
    with safe_mode(), pytest.raises(TypeError, match="an array of Python objects"):
        serialization.pack({"a": numpy.array([object()])})


def test_what_is_registered_is_safe_and_nothing_else() -> None:
    values = [Score(0.5, ["a"]), Point(1, [2]), Color.RED, module_function]
    with safe_mode():
        for value in values:
            with pytest.raises(UnsafeObjectError) as info:
                serialization.unpack(serialization.pack([value]), rank=2)
            name = getattr(value, "__qualname__", type(value).__qualname__)
            assert (info.value.rank, info.value.type_name) == (2, f"{__name__}.{name}")
            assert f"idist.safe_objects({name})" in str(info.value)
    with safe_mode(Score, Point, Color, module_function):
        assert serialization.unpack(serialization.pack(values), rank=2) == values


def test_registered_types_stay_safe_when_torchs_list_was_cleared() -> None:
    before = torch.serialization.get_safe_globals()
    with safe_mode():
        torch.serialization.clear_safe_globals()
        try:
            assert serialization.unpack(serialization.pack(Path("x")), rank=0) == Path("x")
        finally:
            torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: {"a": [one, torch.ones(2)]}])
def test_what_would_run_is_refused_before_it_does(tmp_path: Path, wrapped: Any) -> None:
    folder = tmp_path / "made"
    with safe_mode():
        payload = serialization.pack(wrapped(Runs(folder)))
        with pytest.raises(UnsafeObjectError, match=r"Rank 1 .*posix\.mkdir.*not called") as info:
            serialization.unpack(payload, rank=1)
    assert info.value.type_name == "posix.mkdir"
    with pytest.raises(UnsafeObjectError):  # it needs no trust, so it is given none in the other mode either
        serialization.unpack(payload, rank=1)
    assert not folder.exists()


def test_a_plain_pickle_is_refused_where_objects_are_safe(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    payload = serialization.pack(Runs(folder))
    with safe_mode(), pytest.raises(UnsafeObjectError, match=r"Rank 1 sent a plain pickle.*on every rank"):
        serialization.unpack(payload, rank=1)
    assert not folder.exists()
    serialization.unpack(payload, rank=1)
    assert folder.exists(), "plain pickle would have made it"


@pytest.mark.parametrize("value", [threading.Lock(), Stubborn(), lambda: 1, (i for i in ())])
def test_what_cannot_be_sent_is_a_type_error_in_both_modes(value: Any) -> None:
    with safe_mode(), pytest.raises(TypeError, match="cannot be sent to another process"):
        serialization.pack([value])


def test_small_objects_fit_the_header_when_they_are_safe() -> None:
    with safe_mode():
        assert len(serialization.pack({"loss": 0.5, "epoch": 3})) <= message_header.INLINE_BYTES
        assert len(serialization.pack((1 << 32, [i / 3 for i in range(20)]))) <= message_header.INLINE_BYTES


@pytest.mark.parametrize(("text", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_says_whether_objects_are_safe(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: bool
) -> None:
    monkeypatch.setattr(safe_objects, "_mode", None)
    if text is not None:
        monkeypatch.setenv("IGNITE_DIST_SAFE_OBJECTS", text)
    assert safe_objects.is_safe() is expected


@pytest.mark.parametrize("text", ["yes", "2", " 1", "true"])
def test_an_environment_that_says_neither_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(safe_objects, "_mode", None)
    monkeypatch.setenv("IGNITE_DIST_SAFE_OBJECTS", text)
    for _ in range(2):  # and not for the first object only
        with pytest.raises(EnvironmentVariablesError, match="IGNITE_DIST_SAFE_OBJECTS must be 0 or 1"):
            serialization.pack(1)


@pytest.mark.parametrize("wrong", [3, "Score", partial(module_function, 1)])
def test_only_classes_and_functions_are_registered(wrong: Any) -> None:
    with pytest.raises(TypeError, match="classes and functions"):
        idist.safe_objects(wrong)
    assert not safe_objects.is_safe()


@pytest.mark.parametrize("powerful", [os.mkdir, getattr, eval, type, subprocess.Popen])
def test_what_could_run_code_is_not_registered(powerful: Any) -> None:
    with pytest.raises(ValueError, match="could run code in this process"):
        idist.safe_objects(powerful)
    assert not safe_objects.is_safe()


HUGE = 2**3000  # written in a way of its own


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(a=HUGE),
        Counter({HUGE: 1}),
        deque([HUGE]),
        defaultdict(int, {1: HUGE}),
        range(HUGE),
        Fraction(HUGE, 7),
        (HUGE, True, 1.5, torch.ones(2)),
        datetime(2020, 10, 25, 2, 30, fold=1),
        datetime(2026, 11, 21, tzinfo=ZoneInfo("UTC")),
        time(2, 30, fold=1),
        {0.0, -1},
        -0.0,
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_changes_on_the_way(value: Any) -> None:
    with safe_mode():
        received = serialization.unpack(serialization.pack(value), rank=1)
    assert repr(received) == repr(value)


def test_exceptions_may_be_registered() -> None:
    with safe_mode(ValueError):
        assert (
            repr(serialization.unpack(serialization.pack(ValueError("x", 1)), rank=1)) == "ValueError('x', 1)"
        )


@pytest.mark.parametrize("sent", [torch.relu, datetime.fromisoformat], ids=["function", "classmethod"])
def test_what_goes_by_way_of_getattr_is_refused_with_advice(sent: Any) -> None:
    with safe_mode(), pytest.raises(UnsafeObjectError, match="Send the data instead"):
        serialization.unpack(serialization.pack(sent), rank=1)


def exchange(local_rank: int) -> list[Any]:
    return [safe_objects.is_safe(), *idist.all_gather(Path("x"))]


def test_workers_started_after_it_are_safe_from_the_start() -> None:
    with safe_mode():
        results = idist.spawn("gloo", exchange, nproc_per_node=2)
    assert results == [[True, Path("x"), Path("x")]] * 2
    assert not safe_objects.is_safe()


def test_the_bytes_of_at_most_one_element_whatever_its_strides() -> None:
    one = torch.ones(1, dtype=torch.uint8).as_strided((1, 1), (1, 0))
    assert serialization.as_bytes(one).tolist() == [1]
    assert serialization.as_bytes(torch.zeros(3).as_strided((1, 1), (1, 0))).tolist() == [0] * 4
    assert serialization.as_bytes(torch.tensor(1.0).expand(0)).tolist() == []
