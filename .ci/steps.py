"""Runs the steps of ``.ci/run`` side by side, and prints what each has cost.

The output of a step is kept in ``build/ci/NAME.log`` and printed as a whole when the step has ended. At the
end come the slowest tests, a table of the steps, and how many tests passed. Steps that need a failed step are
not run. All others are.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "ci"
# Twice the cores of the machine that runs CI: tests wait for other ranks and for the end of timeouts.
NUM_LANES = 4


def _python() -> str:
    """The Python of the tests.

    Debian's is built with ``--enable-optimizations``, unlike those that pyenv compiles: tests need a tenth
    less of the processors. It is used if it can make environments and build extensions.
    """
    can_build = (
        "import ensurepip, os, sys, sysconfig; assert sys.version_info >= (3, 10); "
        "os.stat(sysconfig.get_config_h_filename())"
    )
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(["/usr/bin/python3", "-c", can_build], check=True, stderr=subprocess.DEVNULL)
        return "/usr/bin/python3"
    return "python3"


# uv is faster than pip, and environments with the same package share its files. It ignores pip's settings. uv
# and its cache are in the checkout, which is all that the chroot of .ci/with-python has of this machine.
INSTALLER = ROOT / ".cache" / "uv"
INSTALL = {
    "PYTHON": _python(),
    "INSTALL": f"{INSTALLER}/bin/uv pip install -q --python $(VENV)/bin/python",
    "UV_CACHE_DIR": f"{INSTALLER}/cache",
    "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ","),
}
NUM_SLOWEST = 25
NUM_CHARACTERS = 600  # of the error of a test that has failed
END_SECONDS = 15.0  # from SIGINT to SIGTERM, and from SIGTERM to SIGKILL


@dataclass
class Step:
    """A command.

    ``lanes``: how many of NUM_LANES it takes; ``pytest -n logical`` has as many processes. Downloads take 0.
    ``after``: the steps that have to pass first.
    """

    name: str
    command: str
    lanes: int = 1
    after: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    outcome: str = "not run"
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def results(self) -> Path:
        """What pytest writes for other programs: PYTEST_ADDOPTS names this file."""
        return LOGS / f"{self.name}.xml"

    def start(self) -> None:
        self.started = time.monotonic()
        results = shlex.quote(f"--junitxml={self.results}")  # pytest splits its options as a shell does
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} {results}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", self.command],
                cwd=ROOT,
                env={
                    **os.environ,
                    **INSTALL,
                    "PYTEST_ADDOPTS": options.strip(),
                    "PYTEST_XDIST_AUTO_NUM_WORKERS": str(self.lanes),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that an interrupt ends all that it has started
            )

    def has_ended(self) -> bool:
        """True once the command has ended; the outcome is known then, and its output was printed."""
        before = _ended_children_seconds()
        if self.process is None or self.process.poll() is None:
            return False
        self.processor_seconds = _ended_children_seconds() - before
        self.seconds = time.monotonic() - self.started
        self.outcome = "passed" if self.process.returncode == 0 else "FAILED"
        print(f"=== {self.name}: {self.outcome} after {self.seconds:.0f} s\n", flush=True)
        sys.stdout.buffer.write(self.log.read_bytes() + b"\n")  # whatever the encoding of the output is
        sys.stdout.flush()
        for suite in _suites(self.results):
            for kind in ("tests", "failures", "errors", "skipped"):
                self.counts[kind] += int(suite.get(kind, 0))
        return True

    def end(self) -> None:
        """Interrupt the command, which has some seconds to clean up; then end what is left of it."""
        self.seconds, self.outcome = time.monotonic() - self.started, "ended"
        if self.process is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)


def _suites(results: Path) -> list[ElementTree.Element]:
    try:
        return list(ElementTree.parse(results).iter("testsuite"))
    except (FileNotFoundError, ElementTree.ParseError):  # pytest has not started, or was killed
        return []


def run(steps: list[Step]) -> bool:
    """Run the steps in their order, as lanes and what they need allow. True if all have passed.

    Ctrl-C, SIGTERM and SIGHUP end what runs. They do not raise: an exception in ``start()`` would leave its
    process running.
    """
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop.append(number))
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    waiting, running = list(steps), []
    outcomes: dict[str, str] = {}
    started, busy = time.monotonic(), _busy_seconds()
    try:
        while (waiting or running) and not stop:
            for step in [step for step in running if step.has_ended()]:
                running.remove(step)
                outcomes[step.name] = step.outcome
            for step in list(waiting):
                needed = [outcomes.get(name) for name in step.after]
                if any(outcome not in (None, "passed") for outcome in needed):
                    waiting.remove(step)
                    outcomes[step.name] = step.outcome  # "not run"
                elif not all(needed):
                    continue
                elif step.lanes + sum(other.lanes for other in running) > NUM_LANES:
                    break  # later steps would take the lanes that it waits for
                else:
                    waiting.remove(step)
                    running.append(step)
                    step.start()
            time.sleep(0.2)
    finally:
        for step in running:
            step.end()
        _show(steps, time.monotonic() - started, _busy_seconds() - busy)
    return all(step.outcome == "passed" for step in steps)


def _busy_seconds() -> float:
    """Processor seconds of this machine since its start."""
    user, nice, system, *_ = Path("/proc/stat").read_text(encoding="ascii").split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _ended_children_seconds() -> float:
    """Processor seconds of the children that have ended, and of what these have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _show(steps: list[Step], seconds: float, busy: float) -> None:
    tests = [
        (test, f"{test.get('classname')}::{test.get('name')}", step.name)
        for step in steps
        for suite in _suites(step.results)
        for test in suite.iter("testcase")
    ]
    costs = sorted((float(test.get("time", 0)), step, name) for test, name, step in tests)
    slowest = "".join(f"{cost:8.1f} s  {step:18} {name}\n" for cost, step, name in costs[-NUM_SLOWEST:])
    (LOGS / "slowest.txt").write_text(slowest, encoding="utf-8")
    print(f"=== the slowest {NUM_SLOWEST} tests\n{slowest}")
    # What ends later than the process that started it is counted in "all" only.
    print(f"=== the steps\n{'step':20} {'outcome':8} {'seconds':>8} {'processor s':>12} {'tests':>7}")
    for step in steps:
        times = f"{step.seconds:8.0f} {step.processor_seconds:12.0f}"
        print(f"{step.name:20} {step.outcome:8} {times} {step.counts['tests'] or '':>7}")
    total: Counter[str] = sum((step.counts for step in steps), Counter())
    print(f"{'all':20} {'':8} {seconds:8.0f} {busy:12.0f} {total['tests']:>7}\n")
    if others := [step.name for step in steps if step.outcome != "passed"]:
        print(f"Steps that have not passed: {', '.join(others)}")
    for test, name, step_name in tests:
        for failure in (*test.iter("failure"), *test.iter("error")):
            print(f"{step_name}: {name} has failed: {failure.get('message', '')[:NUM_CHARACTERS]!r}")
    failed, skipped = total["failures"] + total["errors"], total["skipped"]
    print(f"{total['tests'] - failed - skipped} passed, {failed} failed, {skipped} skipped", flush=True)


# .venv comes first: two pips at once would break it, Horovod is built for the torch in it, and tests would
# see how its packages change. Other environments are downloaded meanwhile. Then the longest step is first,
# beside steps that keep a core busy.
_ALL = ("environment", "horovod")
_KEEP = 'ARGS="--conformance-results=build/conformance-{}.json"'
_INSTALLER = f"python3 -m venv {INSTALLER} && {INSTALLER}/bin/python -m pip install -q -c constraints.txt uv"
# Collecting the tests compiles their modules. Otherwise each of the processes that begin at once would.
_ENVIRONMENT = (
    "make .venv/.has-{test,examples,lint,docs,dist,mpi4py,launchers} && "
    "PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest --collect-only -qq | tail -n 50"
)
_XLA = "make xla && make VENV=.venv-xla CONSTRAINTS=constraints-xla.txt .venv-xla/.has-test"
_NEWEST = "make VENV=.venv-newest CONSTRAINTS=constraints-newest.txt .venv-newest/.has-{test,examples}"
_PYTHON = (
    ".ci/with-python 3.14 make PYTHON=python3.14 VENV=.venv-python3.14 .venv-python3.14/.has-{test,examples}"
)
STEPS = [
    Step("installer", _INSTALLER),
    Step("environment", _ENVIRONMENT, after=("installer",)),
    Step("get-launchers", ".ci/install-launchers", lanes=0),
    Step("get-xla", _XLA, lanes=0, after=("installer",)),
    Step("get-newest", _NEWEST, lanes=0, after=("get-xla",)),
    Step("get-python", _PYTHON, lanes=0, after=("get-newest", "get-launchers")),
    Step("horovod", "make horovod", lanes=2, after=("environment",)),  # a compiler on all cores
    Step("lint", "make lint type", after=_ALL),
    Step("test-long", f"make test-long {_KEEP.format('long')}", lanes=2, after=_ALL),
    Step("test-horovod", f"make test-horovod {_KEEP.format('horovod')}", after=_ALL),
    Step("test-launchers", "make test-launchers", after=(*_ALL, "get-launchers")),
    Step("test-xla", f"make test-xla {_KEEP.format('xla')}", after=("get-xla",)),
    Step("test-mpi4py", "make test-mpi4py ARGS=\"-k 'not mpi4py-3'\"", after=(*_ALL, "get-launchers")),
    Step("test", f"make test {_KEEP.format('torch')}", lanes=2, after=_ALL),
    Step("test-python", "make test-python PYTHON_VERSION=3.14", lanes=2, after=("get-python",)),
    Step("conformance-oldest", "make conformance-oldest", after=("get-xla",)),
    Step("conformance-newest", "make conformance-newest", after=("get-newest",)),
    Step("conformance-gloo", "make conformance-gloo", after=_ALL),
    Step("dist", "make dist", after=_ALL),
    Step("docs", "make docs", after=_ALL),
    Step("demo", "make demo", after=_ALL),
    # Fails if docs/conformance.md differs from the results of this run.
    Step(
        "table",
        ".venv/bin/python tests/conformance_table.py docs/conformance.md "
        "build/conformance-{torch,long,horovod,xla}.json && git diff --exit-code docs/conformance.md",
        after=("test", "test-long", "test-horovod", "test-xla"),
    ),
]


if __name__ == "__main__":
    sys.exit(not run(STEPS))
