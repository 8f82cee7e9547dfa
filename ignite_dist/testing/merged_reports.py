"""One report of pytest, made of those of all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ignite_dist.testing.rank_session import RankReport
from ignite_dist.testing.worlds import Outcome

# The end of a process is noticed later than the failure that it causes on another rank, by at most this time.
_MARGIN_SECONDS = 0.5


def merge(config: pytest.Config, item: pytest.Item, phase: str, outcome: Outcome) -> pytest.TestReport | None:
    """The report of a phase of a test; None if no rank has reached the phase.

    A failure of any rank is the test's. The report of the rank that has failed first is shown in full.
    """
    by_rank = outcome.reports.get(phase, {})
    unfinished = outcome.unfinished if phase == _last_phase(outcome) else {}
    if not by_rank and not unfinished:
        return None
    reports = {rank: _read(config, report) for rank, report in sorted(by_rank.items())}
    failed = sorted(
        (rank for rank, report in reports.items() if report.failed), key=lambda rank: by_rank[rank].ended
    )
    if any(hasattr(report, "wasxfail") and report.skipped for report in reports.values()):
        # With strict=True a rank that passes has failed, but one failing rank was expected.
        failed = [rank for rank in failed if "[XPASS(strict)]" not in reports[rank].longreprtext]
    ended = [rank for rank, one in unfinished.items() if one.ended is not None]
    if ended and not _failed_before(failed, by_rank, unfinished[ended[0]].ended):
        # The failures of other ranks are consequences.
        merged = failure_of(item, phase, f"Rank {ended[0]} {unfinished[ended[0]].text}.")
        consequences = failed
    elif failed:
        merged, consequences = reports[failed[0]], failed[1:]
        _name_rank(merged, failed[0], outcome)
    elif unfinished:
        texts = [f"Rank {rank} {one.text}." for rank, one in sorted(unfinished.items())]
        merged = failure_of(item, phase, " ".join(texts))
        consequences = []
    else:
        return _with_sections(min(reports.values(), key=_priority_of), reports)
    _with_sections(merged, reports)
    merged.sections += [(f"rank {rank} failed too", reports[rank].longreprtext) for rank in consequences]
    merged.sections += [(f"rank {rank} {one.text}", one.stacks) for rank, one in sorted(unfinished.items())]
    return merged


def _failed_before(failed: list[int], by_rank: dict[int, RankReport], ended: float | None) -> bool:
    """True if a rank had failed well before another rank ended."""
    return bool(failed) and ended is not None and by_rank[failed[0]].ended + _MARGIN_SECONDS < ended


def subtests(config: pytest.Config, outcome: Outcome) -> list[Any]:
    """The reports of subtests: the failures of all ranks, and what has passed on the lowest rank."""
    lowest = min(outcome.subtests, default=0)
    return [
        _read(config, report)
        for rank, reports in sorted(outcome.subtests.items())
        for report in reports
        if report.has_failed or rank == lowest
    ]


def _with_sections(merged: pytest.TestReport, reports: dict[int, pytest.TestReport]) -> pytest.TestReport:
    """Give ``merged`` the captured output of all ranks, and the longest duration."""
    merged.sections = [
        (f"{name} (rank {rank})", content)
        for rank, report in reports.items()
        for name, content in report.sections
    ]
    merged.duration = max([report.duration for report in reports.values()], default=0.0)
    return merged


def _read(config: pytest.Config, report: RankReport) -> pytest.TestReport:
    read: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=report.data)
    return read


def _last_phase(outcome: Outcome) -> str:
    """The phase that unfinished ranks were in: the first that not all ranks have reported."""
    finished = [
        phase
        for phase in ("setup", "call", "teardown")
        if outcome.unfinished.keys() <= outcome.reports.get(phase, {}).keys()
    ]
    return {0: "setup", 1: "call"}.get(len(finished), "teardown")


def _priority_of(report: pytest.TestReport) -> int:
    """Failures that were expected come before skips, and skips before passes."""
    return 0 if hasattr(report, "wasxfail") and report.skipped else 1 if report.skipped else 2


def _name_rank(report: pytest.TestReport, rank: int, outcome: Outcome) -> None:
    """Add the rank to the headline of the failure."""
    path, line, name = report.location
    ranks = {one for reports in outcome.reports.values() for one in reports} | outcome.unfinished.keys()
    report.location = (path, line, f"{name}: rank {rank}" + (" failed first" if len(ranks) > 1 else ""))


def failure_of(item: pytest.Item, phase: Any, text: str) -> pytest.TestReport:
    """The report of a failure outside of the test's own code."""
    keywords: dict[str, Any] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, "failed", text, phase)
