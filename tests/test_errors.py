from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.multiprocessing.spawn import ProcessException

import ignite_dist as idist
from helpers import ROOT
from ignite_dist import errors
from pages import blocks, without_blocks

RANK_FAILED = errors.RankFailedError(3, "ValueError", "Traceback: the text")
RAISED = errors.WorkerRaisedError(
    3, "ValueError", "Traceback: the text", "Rank 3 failed first", error_index=1, error_pid=17, host="here"
)
EXITED = errors.WorkerExitedError(
    3, "Rank 3 was ended by SIGKILL", error_index=1, error_pid=17, exit_code=-9, signal_name="SIGKILL"
)
FAULT = errors.WorkerExitedError(3, "Rank 3 was ended by SIGSEGV", 1, 17, -11, "SIGSEGV", "File ...", "here")
PLAIN = [
    errors.DistributedError("a"),
    errors.EnvironmentVariablesError("b"),
    errors.LaunchError("c"),
    errors.CollectiveMismatchError("d"),
    errors.MissingRanksError("e", [1, 3], {1: "at train.py:7"}),
    errors.UnsafeObjectError("e", 1, "posix.mkdir"),
    errors.HostLostError("here", "10.0.0.1"),
]
# Beginnings of shown lines that are torch's, or have too little constant text.
NOT_COMPARED = (" ", "Expected to have finished reduction", "Rank 0 waits in barrier")
LINK = "See ignite_dist's docs/troubleshooting.md#"


@pytest.mark.parametrize(
    "error", [*PLAIN, RANK_FAILED, RAISED, EXITED, FAULT], ids=lambda error: type(error).__name__
)
def test_every_error_is_a_distributed_error_and_pickles(error: errors.DistributedError) -> None:
    assert isinstance(error, errors.DistributedError)
    assert isinstance(error, RuntimeError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_rank_failed_error_names_the_rank_and_carries_its_traceback() -> None:
    assert (RANK_FAILED.rank, RANK_FAILED.error_type) == (3, "ValueError")
    assert RANK_FAILED.traceback == "Traceback: the text"
    for part in ("3", "ValueError", "Traceback: the text"):
        assert part in str(RANK_FAILED)


def test_worker_raised_error_is_what_old_scripts_catch() -> None:
    assert isinstance(RAISED, ProcessRaisedException)
    assert isinstance(RAISED, ProcessException)
    assert isinstance(RAISED, errors.RankFailedError)
    assert not isinstance(RAISED, ProcessExitedException)
    assert (RAISED.error_index, RAISED.error_pid) == (1, 17)
    assert RAISED.msg == "Rank 3 failed first"


def test_worker_exited_error_is_what_old_scripts_catch() -> None:
    assert isinstance(EXITED, ProcessExitedException)
    assert isinstance(EXITED, errors.RankFailedError)
    assert not isinstance(EXITED, ProcessRaisedException)
    assert (EXITED.error_index, EXITED.error_pid, EXITED.exit_code) == (1, 17, -9)
    assert (EXITED.signal_name, EXITED.error_type, EXITED.traceback) == ("SIGKILL", "SIGKILL", "")
    assert (FAULT.traceback, FAULT.host, EXITED.host) == ("File ...", "here", "")
    assert EXITED.message == "Rank 3 was ended by SIGKILL"


@pytest.mark.parametrize(
    "error", [*PLAIN, RANK_FAILED, RAISED, EXITED], ids=lambda error: type(error).__name__
)
def test_a_text_ends_with_the_link_to_its_section(error: errors.DistributedError) -> None:
    assert str(error) == f"{error.args[0].rstrip()}\n{LINK}{error.anchor}"
    assert "See " not in error.args[0]


def test_each_class_has_a_section() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name != "original_exception"]
    text = without_blocks((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    sections = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert len(set(sections)) == len(sections)
    assert {kind.anchor for kind in kinds} <= set(sections)


def _constant_parts() -> set[str]:
    """The constant parts of the strings of the package: what is between the values of a text."""
    found = set()
    for path in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(part.strip() for part in re.split(r"%\w|%\.0f|\{\w+\}|\n", node.value))
    return {part for part in found if len(part) >= 12}


def test_the_texts_that_are_shown_and_not_run_are_those_of_the_package() -> None:
    """A line has a part of at least 12 characters in common with a string of the package."""
    parts = _constant_parts()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for block in blocks(page):
        lines = block.text.splitlines() if not block.language else []
        for line in (line for line in lines if line and not line.startswith(NOT_COMPARED)):
            for text in filter(None, map(str.strip, line.split("..."))):
                assert any(part in text or text in part for part in parts), line


def test_a_text_inside_of_a_text_has_no_link() -> None:
    inner = errors.MissingRanksError("Rank 1 is missing.")
    outer = errors.RankFailedError(1, "MissingRanksError", f"Traceback:\n  | MissingRanksError: {inner}\n")
    assert str(outer) == (
        "Rank 1 raised MissingRanksError; its traceback:\n\nTraceback:\n"
        f"  | MissingRanksError: Rank 1 is missing.\n{LINK}missing-ranks"
    )
    indented = errors.LaunchError(f"a:\n  | b\n  | {LINK}missing-ranks\nc")
    assert str(indented) == f"a:\n  | b\nc\n{LINK}the-job-does-not-start"


def test_the_link_is_that_of_the_error_of_the_first_rank() -> None:
    def anchor_of(error_type: str) -> str:
        return errors.WorkerRaisedError(1, error_type, "", "text", 1, 17).anchor

    assert anchor_of("CollectiveMismatchError") == "mismatched-calls"
    assert anchor_of("ValueError") == anchor_of("RankFailedError") == "a-rank-failed-first"
    assert EXITED.anchor == "a-worker-ended"


def test_errors_are_exported_from_the_package() -> None:
    for name in errors.__all__:
        assert getattr(idist, name) is getattr(errors, name)
        assert name in idist.__all__
