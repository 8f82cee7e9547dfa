"""Runs the steps of ``.ci/run`` side by side, and prints what each has cost.

The output of a step is kept in ``build/ci/NAME.log`` and printed as a whole when the step has ended. At the
end come the slowest tests, a table of the steps, and how many tests passed. A step that fails stops no other
step, unless that one needs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "ci"
# Twice the cores: tests wait for other ranks and for the end of timeouts.
NUM_LANES = 4
NUM_SLOWEST = 25


@dataclass
class Step:
    """A command. ``lanes``: how many it takes, and the processes of pytest in it; 0 for a download.

    ``after``: the steps that have to pass first.
    """

    name: str
    command: str
    lanes: int = 1
    after: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0
    outcome: str = "not run"
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def results(self) -> Path:
        """What pytest writes for other programs: PYTEST_ADDOPTS names this file."""
        return LOGS / f"{self.name}.xml"

    def start(self) -> None:
        self.started = time.monotonic()
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={self.results}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", self.command],
                cwd=ROOT,
                env={
                    **os.environ,
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
        if self.process is None or self.process.poll() is None:
            return False
        self.seconds = time.monotonic() - self.started
        self.outcome = "passed" if self.process.returncode == 0 else "FAILED"
        print(f"=== {self.name}: {self.outcome} after {self.seconds:.0f} s\n", flush=True)
        print(self.log.read_text(encoding="utf-8", errors="replace"), flush=True)
        for suite in _suites(self.results):
            for kind in ("tests", "failures", "errors", "skipped"):
                self.counts[kind] = self.counts.get(kind, 0) + int(suite.get(kind, 0))
        return True

    def end(self) -> None:
        """End the command and all that it has started."""
        self.seconds, self.outcome = time.monotonic() - self.started, "ended"
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)


def _suites(results: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(results).iter("testsuite")) if results.exists() else []


def run(steps: list[Step]) -> bool:
    """Run the steps in their order, as lanes and what they need allow. True if all have passed.

    Ctrl-C and SIGTERM end what runs. They raise nothing: a step that is about to start would be lost.
    """
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop.append(number))
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.iterdir():
        old.unlink()
    waiting, running = list(steps), []
    outcomes: dict[str, str] = {}
    started = time.monotonic()
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
                    break  # else shorter steps would keep it from its lanes
                else:
                    waiting.remove(step)
                    running.append(step)
                    step.start()
            time.sleep(0.2)
    finally:
        for step in running:
            step.end()
        _show(steps, time.monotonic() - started)
    return all(step.outcome == "passed" for step in steps)


def _show(steps: list[Step], seconds: float) -> None:
    tests = [
        (float(test.get("time", 0)), step.name, f"{test.get('classname')}::{test.get('name')}")
        for step in steps
        for suite in _suites(step.results)
        for test in suite.iter("testcase")
    ]
    slowest = "".join(
        f"{cost:8.1f} s  {step:16} {test}\n" for cost, step, test in sorted(tests)[-NUM_SLOWEST:]
    )
    (LOGS / "slowest.txt").write_text(slowest, encoding="utf-8")
    print(f"=== the slowest {NUM_SLOWEST} tests\n{slowest}")
    print(f"=== the steps\n{'step':20} {'outcome':8} {'seconds':>8} {'tests':>7}")
    for step in steps:
        print(f"{step.name:20} {step.outcome:8} {step.seconds:8.0f} {step.counts.get('tests', ''):>7}")
    total = {
        kind: sum(step.counts.get(kind, 0) for step in steps) for kind in ("tests", "failures", "errors")
    }
    print(f"{'all':20} {'':8} {seconds:8.0f} {total['tests']:>7}\n")
    failed = total["failures"] + total["errors"]
    print(f"{total['tests'] - failed} passed, {failed} failed", flush=True)


# The environments come first: two pips at once in one .venv would break it, and Horovod is built for the
# torch in it. Those with other torches and Pythons are downloaded meanwhile. Then the longest step is first.
_KEEP = 'ARGS="--conformance-results=$PWD/build/conformance-{}.json"'
_XLA = "make xla && make VENV=.venv-xla CONSTRAINTS=constraints-xla.txt .venv-xla/.has-test"
_NEWEST = "make VENV=.venv-newest CONSTRAINTS=constraints-newest.txt .venv-newest/.has-{test,examples}"
_PYTHON = ".ci/with-python 3.14 make VENV=.venv-python3.14 .venv-python3.14/.has-test"
STEPS = [
    Step("environment", "make .venv/.has-{test,examples,lint,docs,dist,mpi4py,launchers}"),
    Step("get-launchers", ".ci/install-launchers", lanes=0),
    Step("get-xla", _XLA, lanes=0),
    Step("get-newest", _NEWEST, lanes=0, after=("get-xla",)),
    Step("get-python", _PYTHON, lanes=0, after=("get-newest",)),
    Step("horovod", "make horovod", lanes=2, after=("environment",)),  # a compiler on all cores
    Step("lint", "make lint type", after=("environment",)),
    Step("test-xla", f"make test-xla {_KEEP.format('xla')}", after=("get-xla",)),
    Step("test-horovod", f"make test-horovod {_KEEP.format('horovod')}", after=("horovod",)),
    Step("test", f"make test {_KEEP.format('torch')}", lanes=2, after=("environment",)),
    Step("test-long", f"make test-long {_KEEP.format('long')}", lanes=2, after=("environment",)),
    Step("test-launchers", "make test-launchers", after=("environment", "get-launchers")),
    Step(
        "test-mpi4py", "make test-mpi4py ARGS=\"-k 'not mpi4py-3'\"", after=("environment", "get-launchers")
    ),
    Step("test-python", "make test-python PYTHON_VERSION=3.14", lanes=2, after=("get-python",)),
    Step("conformance-oldest", "make conformance-oldest", after=("get-xla",)),
    Step("conformance-newest", "make conformance-newest", after=("get-newest",)),
    Step("conformance-gloo", "make conformance-gloo", after=("environment",)),
    Step("dist", "make dist", after=("environment",)),
    Step("docs", "make docs", after=("environment",)),
    Step("demo", "make demo", after=("environment",)),
    # What is committed is what was seen.
    Step(
        "table",
        ".venv/bin/python tests/conformance_table.py docs/conformance.md "
        "build/conformance-{torch,long,horovod,xla}.json && git diff --exit-code docs/conformance.md",
        after=("test", "test-long", "test-horovod", "test-xla"),
    ),
]


if __name__ == "__main__":
    sys.exit(not run(STEPS))
