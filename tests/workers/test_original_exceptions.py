"""The worker's own exception, beside the error that ``spawn`` raises."""

from __future__ import annotations

from typing import Any

import pytest

import ignite_dist as idist


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
    for given in (None, ValueError(b"x" * (2 << 20))):
        error = failure(given)
        assert error.__cause__ is None
        assert idist.original(error) is error
        assert ("Named" if given is None else "ValueError") in str(error)


def test_another_error_is_its_own_original() -> None:
    error = ValueError()
    error.__cause__ = KeyError()
    assert idist.original(error) is error
