"""The pytest that runs in each worker: runs the tests that the launching pytest asks for."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ignite_dist.context import identity
from ignite_dist.context.live import current_model
from ignite_dist.testing import fixtures
from ignite_dist.testing.settings import Request, SessionSettings

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of its threads."""


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
        return self.data["outcome"] == "failed" or "wasxfail" in self.data


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


class RankDone(NamedTuple):
    """The test has ended on this rank.

    Attributes:
        num_collectives: number of collectives that this rank has begun in the context.
        has_context: False if the test has ended the context.
    """

    num_collectives: int
    has_context: bool


class NotStarted(NamedTuple):
    """pytest has ended before the first test, for example because of a wrong ``conftest.py``."""

    text: str


def serve(local_rank: int, address: str, settings: SessionSettings) -> None:
    """Run pytest in this worker until the launching pytest closes the connection."""
    with Client(address, "AF_UNIX") as connection:
        connection.send((identity.get_rank(), os.getpid()))
        os.chdir(settings.directory)
        sys.path[:] = settings.module_path
        os.environ.pop("PYTEST_ADDOPTS", None)  # is in the options already
        with open(Path(settings.stacks) / str(os.getpid()), "w", encoding="utf-8") as stacks:
            faulthandler.register(STACKS_SIGNAL, stacks)
            session = RankSession(connection, settings)
            exit_code = pytest.main(settings.arguments, plugins=[session, fixtures])
        if not session.has_started:
            connection.send(NotStarted(f"pytest did not start in a worker ({exit_code!r}): see its output."))
    os._exit(0)  # the ranks of a world that was closed do not wait for each other


class RankSession:
    """Replaces the collection and the loop of pytest."""

    def __init__(self, connection: Connection, settings: SessionSettings) -> None:
        self._connection = connection
        self._options = settings.options
        self._items: dict[str, pytest.Item] = {}
        self._collected: set[str] = set()
        self._errors: list[str] = []
        self.has_started = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        """Take over the options, before other plugins read them."""
        vars(config.option).update(self._options)
        config.stash[fixtures.FOLDER] = ""
        # By this attribute, which pytest-xdist has introduced, plugins know that they write no files.
        config.workerinput = {"workerid": f"rank{identity.get_rank()}"}  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Leave timeouts to the launching pytest: pytest-timeout would end this process."""
        timeouts = config.pluginmanager.get_plugin("timeout")
        if timeouts is not None:
            config.pluginmanager.unregister(timeouts)

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
            self._run(session, request)
            has_context = model.is_current()
            count = model.transport.num_collectives() if has_context else 0
            self._connection.send(RankDone(count, has_context))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report of a phase."""
        config = self._config
        data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._connection.send(RankReport(data, time.monotonic()))

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the configuration."""
        self._config = session.config

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Send the warning, if it can be pickled."""
        warning_message.source = None
        try:
            message = pickle.dumps(warning_message)
        except Exception:  # raised by a class of the user
            return
        self._connection.send(RankWarning(message, when, nodeid, location))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file was not collected."""
        if report.failed:
            self._errors.append(report.longreprtext)

    def _run(self, session: pytest.Session, request: Request) -> None:
        for path in set(request.paths) - self._collected:
            self._collected.add(path)
            self._items.update((item.nodeid, item) for item in session.perform_collect([path]))
        item = self._items.get(request.nodeid)
        if item is not None:
            session.config.stash[fixtures.FOLDER] = request.folder
            session.config.hook.pytest_runtest_protocol(
                item=item, nextitem=self._items.get(request.following)
            )
            return
        causes = "\n".join(self._errors) or "Are its parameters the same in every process?"
        text = f"The worker did not find {request.nodeid}.\n{causes}"
        location = (request.paths[0], None, request.nodeid)
        self.pytest_runtest_logreport(
            pytest.TestReport(request.nodeid, location, {}, "failed", text, "setup")
        )
