"""The worker's own exception, beside the error that ``spawn`` raises."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

import ignite_dist as idist
from ignite_dist.workers.sent_exceptions import decode_exception, encode_exception


class Named(Exception):
    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")
        self.name = name


class Plain(Exception):
    pass


def _raises(local_rank: int, error: Exception | None) -> None:
    if local_rank == 1:
        if error is None:
            raise Named("two arguments, and one text for pickle", 2)
        raise error


def failure(error: Exception | None) -> idist.RankFailedError:
    with pytest.raises(idist.RankFailedError) as info:
        idist.spawn("gloo", _raises, (error,), nproc_per_node=2)
    return info.value


@pytest.mark.parametrize("kind", [KeyError, Plain])
def test_the_cause_is_the_exception_of_the_worker(kind: Any) -> None:
    error = failure(kind("lr", {"a": [1]}))
    assert type(error.__cause__) is kind
    assert idist.original(error) is error.__cause__
    assert idist.original(error).args == ("lr", {"a": [1]})
    assert "_raises" in str(error), "the traceback is in the text"


def test_an_exception_that_cannot_be_sent_is_in_the_text_only() -> None:
    locked = ValueError("with a lock")
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    error = failure(ValueError(b"x" * (2 << 20)))
    assert error.__cause__ is None
    assert idist.original(error) is error
    assert "ValueError" in str(error)
    assert encode_exception(locked) is None


def test_a_class_with_an_init_of_its_own() -> None:
    original = idist.original(failure(None))
    assert isinstance(original, Named)
    assert original.args == ("two arguments, and one text for pickle 2",)
    assert original.name == "two arguments, and one text for pickle"
    called = decode_exception(encode_exception(subprocess.CalledProcessError(2, "make")))
    assert isinstance(called, subprocess.CalledProcessError) and called.returncode == 2
    missing = decode_exception(encode_exception(FileNotFoundError(2, "No such file", "here")))
    assert isinstance(missing, FileNotFoundError) and (missing.errno, missing.filename) == (2, "here")


def test_another_error_is_its_own_original() -> None:
    error = ValueError()
    error.__cause__ = KeyError()
    assert idist.original(error) is error
