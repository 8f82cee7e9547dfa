"""The plugin in the pytest that the user has started: sends tests to the ranks, and merges their reports."""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from ignite_dist.testing import fixtures
from ignite_dist.testing.debugging import Terminal
from ignite_dist.testing.merged_reports import failure_of, merge, subtests
from ignite_dist.testing.settings import (
    PARAMETER,
    Request,
    SessionSettings,
    WorldSettings,
    timeout_of,
    worlds_of,
)
from ignite_dist.testing.worlds import Outcome, World

NAME = "ignite_dist.testing"

# Options that only the launching pytest follows: what to collect, where to report, how to distribute.
_OWN_OPTIONS = {
    *("basetemp", "cacheclear", "collectonly", "deselect", "dist", "distload", "failedfirst", "file_or_dir"),
    *("help", "inifilename", "keyword", "lf", "loadgroup", "markexpr", "maxfail", "maxprocesses", "newfirst"),
    *("numprocesses", "override_ini", "plugins", "px", "rootdir", "rsyncdir", "setuponly", "setupplan"),
    *("setupshow", "stepwise", "stepwise_skip", "testrunuid", "tx", "version"),
}
_PHASES = ("setup", "call", "teardown")


def parametrize(metafunc: pytest.Metafunc, marker: pytest.Mark) -> None:
    """Make a test of each world that the marker names."""
    try:
        worlds = worlds_of(marker)
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from None
    manager, is_worker = metafunc.config.pluginmanager, fixtures.WORLD_FOLDER_KEY in metafunc.config.stash
    if not is_worker and not manager.has_plugin(NAME):
        manager.register(RankTests(metafunc.config), NAME)
    metafunc.fixturenames.append(PARAMETER)
    # By the scope, pytest runs the tests of a world together.
    metafunc.parametrize(PARAMETER, worlds, ids=[str(world) for world in worlds], scope="session")


class RankTests:
    """Runs the tests that have the marker. Keeps the workers of one world."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._terminal = Terminal(config)
        self._world: World | None = None
        self._numbers = count()
        self._limit = math.inf  # of pytest-timeout for the current test, in seconds

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Take over the limit of pytest-timeout, because the report then shows the stacks of all ranks."""
        if _world_of(item) is None:
            return None
        self._limit = settings.timeout
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run one test, if it has the marker."""
        settings = _world_of(item)
        if settings is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, nextitem, settings):
            item.ihook.pytest_runtest_logreport(report=report)
        _tear_down_earlier(item, nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the workers."""
        self._close()

    def _reports(
        self, item: pytest.Item, nextitem: pytest.Item | None, settings: WorldSettings
    ) -> Iterator[pytest.TestReport]:
        marker = item.get_closest_marker("ranks")
        assert marker is not None
        following = nextitem if nextitem is not None and _world_of(nextitem) == settings else None
        request = Request(
            paths=(str(item.path), *([] if following is None else [str(following.path)])),
            nodeid=item.nodeid,
            following="" if following is None else following.nodeid,
            number=next(self._numbers),
        )
        timeout, self._limit = min(timeout_of(marker), self._limit), math.inf
        try:
            outcome = self._world_for(settings, item).run(request, timeout)
        except Exception as error:
            self._close()
            yield failure_of(item, "setup", f"The test was not run: {error}")
            return
        except BaseException:
            self._close()
            raise
        self._pass_on_warnings(outcome)
        if not outcome.is_reusable or following is None:
            self._close()
        yield from subtests(self._config, outcome)
        reports = {phase: merge(self._config, item, phase, outcome) for phase in _PHASES}
        setup, call = reports["setup"], reports["call"]
        if setup is not None and not setup.passed and call is not None:  # pytest expects no call then
            setup.sections += call.sections
            if call.failed:  # another rank was still in its setup
                setup.sections.append((str(call.location[2]), call.longreprtext))
            del reports["call"]
        yield from filter(None, reports.values())
        if outcome.exit is not None:
            pytest.exit(outcome.exit)

    def _world_for(self, settings: WorldSettings, item: pytest.Item) -> World:
        if self._world is not None and self._world.settings != settings:
            self._close()
        if self._world is None:
            with self._terminal.without_capture():
                self._world = World(settings, self._session_settings(item), self._terminal)
        return self._world

    def _close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _session_settings(self, item: pytest.Item) -> SessionSettings:
        config = self._config
        # What pytest reads before it takes over the options, and what plugins read at their import.
        early = config.known_args_namespace
        arguments = ["-p", "no:terminal", "-o", "addopts=", "--rootdir", str(config.rootpath)]
        arguments += [f"--capture={early.capture}", f"--import-mode={early.importmode}"]
        arguments += [f"--assert={early.assertmode}", *(["--noconftest"] if early.noconftest else [])]
        arguments += [] if config.inipath is None else ["-c", str(config.inipath)]
        for option, values in (
            ("-p", early.plugins),
            ("-o", early.override_ini),
            ("-W", early.pythonwarnings),
        ):
            arguments += [word for value in values or () for word in (option, value)]
        return SessionSettings(
            directory=os.getcwd(),
            module_path=list(sys.path),
            arguments=[*arguments, str(item.path)],
            options={
                name: value
                for name, value in vars(config.option).items()
                if name not in _OWN_OPTIONS and _can_be_sent(value)
            },
            worker_input=dict(getattr(config, "workerinput", {})),
            folder=str(config._tmp_path_factory.mktemp("ranks", numbered=True)),  # type: ignore[attr-defined]
        )

    def _pass_on_warnings(self, outcome: Outcome) -> None:
        """Warn as in a test of this process, once for all ranks."""
        for warning in {warning.key: warning for warning in outcome.warnings}.values():
            self._config.hook.pytest_warning_recorded.call_historic(kwargs=warning.arguments())


def _tear_down_earlier(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tear down the fixtures of earlier tests of this process that the next test does not use."""
    call = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(nextitem),
        "teardown",
        reraise=(pytest.exit.Exception, KeyboardInterrupt),
    )
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)


def _world_of(item: pytest.Item) -> WorldSettings | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(PARAMETER)


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # raised by a class of another plugin
        return False
    return True
