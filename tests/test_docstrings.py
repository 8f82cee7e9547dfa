"""The examples of the package's docstrings are run, on gloo. See :mod:`docstring_examples`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import commands
import ignite_dist as idist
from docstring_examples import Example, find, run, run_all, run_all_in_a_context
from helpers import free_port, run_ranks, torchrun_environs

WITH_TEST = commands.with_test()  # an example of commands has its test there
EXAMPLES = [one for one in find() if not set(one.code.splitlines()) <= WITH_TEST]
# The context cannot be used after these. Errors that they are meant to raise, as spawn sees them.
ALONE: dict[str, type[BaseException] | None] = {
    "kill": idist.RankFailedError,
    "raise_": OSError,
    "disconnect": None,
    "safe_objects": None,
}


_MAX_WORDS = 150
_SECTION = re.compile(r"^(?:Args|Attributes|Examples?|Raises|Returns|Yields)::?$", re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in idist.__all__ if callable(getattr(idist, name))])
def test_the_text_before_the_sections_is_short(name: str) -> None:
    """Details belong into the guides in ``docs/``."""
    text = _SECTION.split(inspect.getdoc(getattr(idist, name)) or "")[0]
    num_words = len(text.split())
    assert 0 < num_words <= _MAX_WORDS, f"{name}: {num_words} words, at most {_MAX_WORDS}"


def _alone(example: Example) -> str | None:
    return next((name for name in ALONE if f"{name}(" in example.code and example.num_ranks == 2), None)


def _together(num_ranks: int) -> list[Example]:
    return [one for one in EXAMPLES if one.num_ranks == num_ranks and _alone(one) is None]


def test_no_kind_of_example_is_missing() -> None:
    assert all(map(_together, (1, 2, 4))) and {_alone(one) for one in EXAMPLES} == {None, *ALONE}


def test_on_two_ranks(tmp_path: Path) -> None:
    idist.spawn("gloo", run_all, (_together(2), tmp_path), nproc_per_node=2)


@pytest.mark.long
def test_on_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    environs = torchrun_environs(4, free_port(), nproc_per_node=2, agent_store=False)
    run_ranks(run_all_in_a_context, _together(4), tmp_path, world_size=4, environs=environs)


@pytest.mark.long
@pytest.mark.parametrize("example", [one for one in EXAMPLES if _alone(one)], ids=_alone)
def test_alone(example: Example, tmp_path: Path) -> None:
    error = ALONE[str(_alone(example))]
    if error is None:
        idist.spawn("gloo", run_all, ([example], tmp_path), nproc_per_node=2)
        return
    with pytest.raises(idist.RankFailedError) as caught:
        idist.spawn("gloo", run_all, ([example], tmp_path), nproc_per_node=2)
    assert isinstance(idist.original_exception(caught.value), error)


@pytest.mark.long
@pytest.mark.parametrize("example", _together(1), ids=lambda example: example.place)
def test_that_starts_workers(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(example, tmp_path)
