"""What other ranks and launchers may hand us, and what they may not: values, errors of ours, nothing else."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ignite_dist import CollectiveMismatchError, DistributedError, EnvironmentVariablesError, environments
from ignite_dist.environments import slurm
from ignite_dist.testing.conformance.cases import safe_mode
from ignite_dist.values import message_header, safe_objects, serialization

pytestmark = pytest.mark.stress

Fuzz = Callable[..., Callable[[Callable[..., None]], None]]


@pytest.fixture
def fuzz(repetitions: Callable[[int, int], int]) -> Fuzz:
    """``@fuzz(strategy, ...)`` calls a function with many examples, the same ones in each run."""

    def decorate(*strategies: Any, examples: int = 40) -> Callable[[Callable[..., None]], None]:
        profile = settings(
            max_examples=repetitions(examples, 20 * examples),
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return lambda check: profile(given(*strategies)(check))()

    return decorate


# --- values ------------------------------------------------------------------------------------------

hashables = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**1000), 10**1000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=600)
    | st.dates()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.fractions(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(hashables, inner, max_size=5)
        | st.sets(hashables, max_size=3)
        | st.builds(bytearray, st.binary())
        | st.builds(Counter, st.text(max_size=5))
    ),
    max_leaves=12,
)


def test_values_come_back_as_they_were(fuzz: Fuzz) -> None:
    @fuzz(values)
    def check(value: Any) -> None:
        for payload in (serialization.pack(value), serialization.encode_by_value(value)):
            copy = serialization.unpack(memoryview(payload), rank=0)
            assert (copy, type(copy)) == (value, type(value))


def test_values_come_back_as_they_were_where_objects_are_safe(fuzz: Fuzz) -> None:
    with safe_mode():

        @fuzz(values)
        def check(value: Any) -> None:
            copy = serialization.unpack(memoryview(serialization.pack(value)), rank=0)
            assert (copy, type(copy)) == (value, type(value))


# --- the header --------------------------------------------------------------------------------------


def test_a_header_gives_back_what_was_put_into_it(fuzz: Fuzz) -> None:
    @fuzz(st.binary(max_size=600))
    def check(payload: bytes) -> None:
        length, inline = message_header.read_header(memoryview(message_header.write_header(payload)), rank=0)
        assert length == len(payload)
        assert inline == (payload if length <= message_header.INLINE_BYTES else None)


def test_a_header_that_is_none_is_an_error(fuzz: Fuzz) -> None:
    magic = bytes(message_header.write_header(b"")[:4])
    start = st.binary(max_size=40) | st.binary(max_size=40).map(lambda rest: magic + rest)

    @fuzz(start, st.integers(0, 255))
    def check(start: bytes, filling: int) -> None:
        garbage = start + bytes([filling]) * (message_header.HEADER_BYTES - len(start))
        with pytest.raises(CollectiveMismatchError, match="rank 3"):
            message_header.read_header(memoryview(garbage), rank=3)


def test_a_header_with_a_bit_flipped_is_an_error(fuzz: Fuzz) -> None:
    @fuzz(st.binary(max_size=600), st.data())
    def check(payload: bytes, data: st.DataObject) -> None:
        header = message_header.write_header(payload)
        used = 16 + (len(payload) if len(payload) <= message_header.INLINE_BYTES else 0)
        header[data.draw(st.integers(0, used - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(CollectiveMismatchError):
            message_header.read_header(memoryview(header), rank=0)


# --- payloads ----------------------------------------------------------------------------------------


def unpack_or_refuse(payload: bytes) -> bool:
    """Whether ``payload`` could be decoded; if not, the error is one of ours, and it came soon."""
    started = time.monotonic()
    try:
        serialization.unpack(payload, rank=0)
    except DistributedError:
        return False
    finally:
        assert time.monotonic() - started < 10
    return True


def test_truncated_messages_are_an_error(fuzz: Fuzz) -> None:
    @fuzz(values, st.data())
    def check(value: Any, data: st.DataObject) -> None:
        payload = serialization.pack(value)
        assert not unpack_or_refuse(payload[: data.draw(st.integers(0, len(payload) - 1))])


def test_truncated_messages_are_an_error_where_objects_are_safe(fuzz: Fuzz) -> None:
    tensors = st.integers(0, 9).map(torch.ones)
    with safe_mode():

        @fuzz(values | st.lists(tensors, max_size=3), st.data())
        def check(value: Any, data: st.DataObject) -> None:
            payload = serialization.pack(value)
            assert not unpack_or_refuse(payload[: data.draw(st.integers(0, len(payload) - 1))])


def test_garbage_is_an_error_where_objects_are_safe(fuzz: Fuzz) -> None:
    with safe_mode():
        compact, with_tensors = serialization.pack(None), serialization.pack(torch.ones(1))
        starts = st.sampled_from(
            [b"", b"\x80\x05", b"\x80\x02", compact[:15], compact[:-2], with_tensors[:4]]
        )

        @fuzz(starts, st.binary(max_size=300))
        def check(start: bytes, rest: bytes) -> None:
            unpack_or_refuse(start + rest)


def test_messages_that_changed_on_the_way_are_values_or_an_error_where_objects_are_safe(fuzz: Fuzz) -> None:
    originals: list[Any] = [
        {"loss": 0.5, "large": (1, 2**70), "b": b"\xff" * 9, "s": {1, 2}},
        {"t": torch.arange(6.0).view(2, 3).t(), "u": torch.ones(3, dtype=torch.uint16)},
        [torch.nn.Parameter(torch.ones(2)), torch.eye(3).to_sparse(), range(5)],
    ]
    decoded: Counter[bool] = Counter()
    with safe_mode():
        payloads = [serialization.pack(original) for original in originals]
        changes = st.lists(
            st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 4), st.binary(max_size=4)),
            min_size=1,
            max_size=3,
        )

        @fuzz(st.sampled_from(payloads), changes, examples=120)
        def check(payload: bytes, changes: list[tuple[float, int, bytes]]) -> None:
            changed = bytearray(payload)
            for where, cut, pasted in changes:
                position = int(where * len(changed))
                changed[position : position + cut] = pasted
            decoded[unpack_or_refuse(bytes(changed))] += 1

        for original, payload in zip(originals, payloads, strict=True):  # and it harms no later message
            assert repr(serialization.unpack(payload, rank=0)) == repr(original)
    assert min(decoded[True], decoded[False]) > 5


# --- environments ------------------------------------------------------------------------------------

TORCHRUN = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
    **{"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1"},
}
SLURM = {
    **{"SLURM_JOB_ID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_STEP_NODELIST": "a[1-2]"},
    **{"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"},
}
odd = st.sampled_from(["", "0", " 2", "-1", "65536", "٣", "1_0", "9" * 5000])
texts = odd | st.integers(0, 5).map(str) | st.text("ag[]019-, ", max_size=12) | st.text(max_size=9)


def test_any_environment_is_a_place_or_none_or_an_error_of_ours(fuzz: Fuzz) -> None:
    found: Counter[str] = Counter()

    @fuzz(
        st.sampled_from([{}, TORCHRUN, SLURM, {**TORCHRUN, **SLURM}]),  # so that it gets behind the first one
        st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM]), texts, max_size=4),
        examples=200,
    )
    def check(right: dict[str, str], changes: dict[str, str]) -> None:
        found[kind_of({**right, **changes})] += 1

    assert min(found[kind] for kind in ("torchrun", "Slurm", "None", "error")) > 10, found


def kind_of(environ: dict[str, str]) -> str:
    try:
        place = environments.detect(environ)
    except EnvironmentVariablesError:
        return "error"
    if place is None:
        return "None"
    assert 0 <= place.rank < place.world_size < 10**10
    for rank, size in ((place.local_rank, place.nproc_per_node), (place.node_rank, place.nnodes)):
        assert rank is None or rank >= 0
        assert size is None or size > (rank or 0)
    assert place.main_address
    assert place.main_port is not None and 1 <= place.main_port <= 65535
    return place.launcher


def test_the_first_host_of_any_slurm_list(fuzz: Fuzz) -> None:
    name = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
    ranges = st.lists(st.from_regex(r"[0-9]{1,4}(-[0-9]{1,4})?", fullmatch=True), min_size=1, max_size=3)
    pieces = st.lists(st.tuples(name, ranges), min_size=1, max_size=3)

    @fuzz(pieces, st.lists(name, max_size=2), st.sampled_from([",", ", ", " ,"]))
    def check(pieces: list[tuple[str, list[str]]], others: list[str], comma: str) -> None:
        host = "".join(f"{name}[{','.join(numbers)}]" for name, numbers in pieces)
        first = "".join(name + numbers[0].partition("-")[0] for name, numbers in pieces)
        assert slurm.first_host(comma.join([host, *others])) == first

    @fuzz(texts, st.sampled_from([1, 50_000]))
    def check_any(text: str, times: int) -> None:
        try:
            first = slurm.first_host((text * times)[:100_000])  # a variable holds no more than 128 KB
        except EnvironmentVariablesError:
            return
        assert first and not set(first) & set("[], ")


def test_whether_objects_are_safe_is_yes_or_no_or_an_error(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IGNITE_DIST_SAFE_OBJECTS", "")
    words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)

    @fuzz(words | st.sampled_from(["0", "1", ""]))
    def check(text: str) -> None:
        os.environ["IGNITE_DIST_SAFE_OBJECTS"] = text
        monkeypatch.setattr(safe_objects, "_mode", None)
        try:
            assert safe_objects.is_safe() is (text == "1")
        except EnvironmentVariablesError:
            assert text not in ("", "0", "1")
