from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable

import pytest

from ignite_dist.workers.supervisor import processes

# Ranks are forks of a server that has imported what they use: each would take seconds for it.
multiprocessing.set_forkserver_preload(
    [
        *("pytest", "psutil", "torch", "torch.nn.parallel", "torch._dynamo", "torch.distributed.fsdp"),
        *("torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel"),
    ]
)
# What the tests under @pytest.mark.stress have counted: printed at the end of a run with --stress.
_tally = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="the long form of the tests that repeat things")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items if config.getoption("--stress") else ():
        if item.get_closest_marker("stress") is not None:
            item.add_marker(pytest.mark.timeout(1800), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--stress") and _tally in config.stash:
        terminalreporter.section("what was repeated")
        for name, count in sorted(config.stash[_tally].items()):
            terminalreporter.write_line(f"{count:7,} {name}")


@pytest.fixture
def repetitions(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """``repetitions(short, long)``: how often a test does something; ``long`` times in ``make stress``."""
    return lambda short, long: long if request.config.getoption("--stress") else short


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """``tally(name)`` counts one more of ``name`` in the summary of ``make stress``."""
    counter = request.config.stash.setdefault(_tally, Counter())

    def count(name: str) -> None:
        counter[name] += 1

    return count


@pytest.fixture
def every_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, launchers wait for the report of each rank, however slow the machine is."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 60.0)


@pytest.fixture(params=[2, 3])
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Of the tests of Horovod's gradients."""
    return int(request.param)
