from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from conformance.table import ResultsWriter
from helpers import is_launcher_variable

# What the tests under @pytest.mark.stress have counted: printed at the end of a run with --stress.
_tally = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="the long form of the tests that repeat things")
    kept = "keep what the conformance suite sees, as JSON"
    parser.addoption("--conformance-results", type=Path, metavar="FILE", help=kept)


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


def pytest_configure(config: pytest.Config) -> None:
    """What the processes of the tests inherit does not depend on who started pytest."""
    # In the background (``make test &``, ``nohup``) Ctrl-C is ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where nothing is buffered (images of containers often say so), print() writes a line and its end one
    # after the other: those of two ranks that share a file get between each other.
    os.environ.pop("PYTHONUNBUFFERED", None)
    path = config.getoption("--conformance-results")
    if path is not None and not hasattr(config, "workerinput"):  # not in the workers of pytest-xdist
        config.pluginmanager.register(ResultsWriter(path))


@pytest.fixture(params=[2, 3])
def num_ranks(request: pytest.FixtureRequest) -> int:
    """Of the tests of Horovod's gradients."""
    return int(request.param)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts without a launcher's variables and leaves no context behind."""
    for name in list(os.environ):
        if is_launcher_variable(name):
            monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left its process group behind")
