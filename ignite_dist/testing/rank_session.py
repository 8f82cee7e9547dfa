"""The pytest that runs in each worker: runs the tests that the launching pytest asks for."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Generator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ignite_dist.context import identity
from ignite_dist.context.live import current_model
from ignite_dist.testing import fixtures
from ignite_dist.testing.debugging import RankDebugger
from ignite_dist.testing.kept_workers import register_stacks
from ignite_dist.testing.line_coverage import LineCoverage
from ignite_dist.testing.settings import Request, SessionSettings


class RankReport(NamedTuple):
    """pytest's report of one phase of a test, on one rank.

    Attributes:
        data: the report, made by ``pytest_report_to_serializable``.
        ended: when the phase ended, by a clock that the ranks of a machine share.
    """

    data: dict[str, Any]
    ended: float

    @property
    def has_failed(self) -> bool:
        """True if other ranks may wait in vain for this one."""
        outcome = self.data["outcome"]
        return outcome == "failed" or (outcome == "skipped" and "wasxfail" in self.data)

    @property
    def is_of_subtest(self) -> bool:
        """True if this is the report of a block ``with subtests.test(...)``."""
        return "$report_type" not in self.data  # pytest marks the reports of tests so


class RankWarning(NamedTuple):
    """A warning that pytest has recorded on a rank."""

    message: bytes
    when: str
    nodeid: str
    location: tuple[str, int, str] | None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same warning of several ranks."""
        shown = pickle.loads(self.message)
        return str(shown.message), shown.category, shown.filename, shown.lineno, self.nodeid

    def arguments(self) -> dict[str, Any]:
        """The arguments of the hook ``pytest_warning_recorded``."""
        return {
            "warning_message": pickle.loads(self.message),
            "when": self.when,
            "nodeid": self.nodeid,
            "location": self.location,
        }


class Running(NamedTuple):
    """The rank has collected the test, and runs it now."""


class RankDone(NamedTuple):
    """The test has ended on this rank.

    Attributes:
        num_collectives: number of collectives that this rank has begun in the context.
        has_context: False if the test has ended the context.
    """

    num_collectives: int
    has_context: bool


class SessionExit(NamedTuple):
    """The test has ended the session by ``pytest.exit``, or the user has quit the debugger."""

    text: str


class NotStarted(NamedTuple):
    """pytest has ended before the first test, for example because of an error in ``conftest.py``."""

    text: str


def serve(local_rank: int, address: str, settings: SessionSettings) -> None:
    """Run pytest in this worker until the launching pytest closes the connection."""
    register_stacks(address)
    with Client(address, "AF_UNIX") as connection:
        connection.send((identity.get_rank(), os.getpid()))
        os.chdir(settings.directory)
        sys.path[:] = settings.module_path
        os.environ.pop("PYTEST_ADDOPTS", None)  # is in the options already
        debugger = RankDebugger(connection)
        session = RankSession(connection, settings, debugger)
        plugins = [session, debugger, fixtures, *LineCoverage.plugins(settings.options)]
        exit_code = pytest.main(settings.arguments, plugins=plugins)
        if not session.has_started:
            connection.send(NotStarted(f"pytest did not start in a worker ({exit_code!r}): see its output."))
    os._exit(0)  # the ranks of a world that was closed do not wait for each other


class RankSession:
    """Replaces the collection and the loop of pytest."""

    def __init__(self, connection: Connection, settings: SessionSettings, debugger: RankDebugger) -> None:
        self._connection = connection
        self._settings = settings
        self._debugger = debugger
        self._items: dict[tuple[str, str], pytest.Item] = {}
        self._collected: set[str] = set()
        self._directories: dict[Path, pytest.Collector | None] = {}
        self._errors: list[str] = []
        self.has_started = False

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Accept settings of the plugin that prints, which workers do not have."""
        for name, default in (("console_output_style", "classic"), ("verbosity_test_cases", "auto")):
            parser.addini(name, "only for the launching pytest", default=default)

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        """Take over the options, before other plugins read them."""
        vars(config.option).update(self._settings.options)
        config.option.basetemp = str(Path(self._settings.folder) / f"rank-{identity.get_rank()}")
        config.option.trace = getattr(config.option, "trace", False) and identity.get_rank() == 0
        config.stash[fixtures.WORLD_FOLDER_KEY] = Path(self._settings.folder)
        # By this attribute, which pytest-xdist has introduced, plugins know that they write no files.
        given = self._settings.worker_input
        own = {"workerid": "-".join(filter(None, [given.get("workerid"), f"rank{identity.get_rank()}"]))}
        config.workerinput = {"testrunuid": "", **given, **own}  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Turn off plugins that would end this process, or repeat a test on this rank alone."""
        for name in ("timeout", "rerunfailures"):
            plugin = config.pluginmanager.get_plugin(name)
            if plugin is not None:
                config.pluginmanager.unregister(plugin)

    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests until the connection is closed."""
        self.has_started = True
        model = current_model()
        while True:
            try:
                request: Request = self._connection.recv()
            except EOFError:
                return True
            try:
                self._run(session, request)
            except pytest.exit.Exception as error:
                self._connection.send(SessionExit(str(error)))
                raise
            self._debugger.leave()
            has_context = model.is_current()
            count = model.transport.num_collectives() if has_context else 0
            self._connection.send(RankDone(count, has_context))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a phase."""
        try:
            self._send(report)
        except Exception as error:  # raised by pickle, or by a class of the user
            text = f"The report of this rank cannot be sent: {type(error).__name__}: {error}"
            self._send(pytest.TestReport(report.nodeid, report.location, {}, "failed", text, report.when))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the configuration."""
        self._config = session.config

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Send the warning of a test, if it can be pickled. The launching pytest has the others itself."""
        if when != "runtest":
            return
        warning_message.source = None
        try:
            message = pickle.dumps(warning_message)
            pickle.loads(message)
        except Exception:  # raised by a class of the user
            return
        self._connection.send(RankWarning(message, when, nodeid, location))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file was not collected."""
        if report.failed:
            self._errors.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(
        self, path: Path
    ) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        """Collect a directory once, so that the files of a package share its fixtures."""
        collected = yield
        return self._directories.setdefault(path, collected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep all tests, before other plugins leave some out: the launching pytest has chosen already."""
        self._items.update((_key(str(item.path), item.nodeid), item) for item in items)

    def _send(self, report: pytest.TestReport) -> None:
        config = self._config
        data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._connection.send(RankReport(data, time.monotonic()))

    def _run(self, session: pytest.Session, request: Request) -> None:
        for path in request.paths:
            if path not in self._collected:
                self._collected.add(path)
                session.perform_collect([path])
        self._connection.send(Running())
        item = self._items.get(_key(request.paths[0], request.nodeid))
        if item is not None:
            letters = "".join(letter if letter.isalnum() else "_" for letter in item.name)[:30]
            folder = Path(self._settings.folder, f"{letters}-{request.number}")
            session.config.stash[fixtures.FOLDER_KEY] = folder
            following = self._items.get(_key(request.paths[-1], request.following))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            return
        causes = "\n".join(self._errors) or "Are its parameters the same in every process?"
        text = f"The worker did not find {request.nodeid}.\n{causes}"
        location = (request.paths[0], None, request.nodeid)
        self.pytest_runtest_logreport(
            pytest.TestReport(request.nodeid, location, {}, "failed", text, "setup")
        )


def _key(path: str, nodeid: str) -> tuple[str, str]:
    """Identifies a test. The part of ``nodeid`` before ``::`` depends on the command line of pytest."""
    return path, nodeid.partition("::")[2]
