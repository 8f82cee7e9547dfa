"""Runs cases, each in a process of its own with a time limit, and shows what they have seen."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import plain_environ

AT_ONCE = 4


class Case(NamedTuple):
    """A question to the GPU.

    Attributes:
        number: in the order of what was asked first.
        ask: the function.
        seconds: after these the process of the case is ended.
        alone: True if the case measures time or memory: no other case runs meanwhile.
    """

    number: str
    ask: Callable[[], str]
    seconds: float
    alone: bool

    @property
    def name(self) -> str:
        return self.ask.__name__

    @property
    def expected(self) -> str:
        return " ".join((inspect.getdoc(self.ask) or "").split())


CASES: dict[str, Case] = {}


def case(number: str, seconds: float = 60, alone: bool = False) -> Callable[[Callable[[], str]], Any]:
    def register(ask: Callable[[], str]) -> Callable[[], str]:
        CASES[ask.__name__] = Case(number, ask, seconds, alone)
        return ask

    return register


class Answer(NamedTuple):
    """What a case has seen."""

    name: str
    as_expected: bool
    seen: str
    seconds: float


def _run(script: str, one: Case, device: str, seconds: float | None) -> Answer:
    limit = seconds or one.seconds
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environ = {"TMPDIR": folder, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
        path, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, script, one.name, "--answer", str(path)],
                env=plain_environ(**environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that its children end with it
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        ended = process.poll()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        took = time.monotonic() - start
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        tail = " | ".join(text.splitlines()[-12:])[-1500:]
        if not path.exists():
            how = f"no end within {limit:.0f} s" if ended is None else f"ended with status {ended}"
            return Answer(one.name, False, f"{how}: {tail}", took)
        as_expected, seen = json.loads(path.read_text(encoding="utf-8"))
        if ended != 0:
            as_expected, seen = False, f"{seen}; then it ended with status {ended}: {tail}"
        return Answer(one.name, as_expected, seen, took)


def _answer(script: str, one: Case, path: Path) -> None:
    """Run the case in this process and write what it has seen."""
    try:
        answer = [True, one.ask()]
    except AssertionError as error:
        answer = [False, f"{error} ({traceback.extract_tb(error.__traceback__)[-1].lineno})"]
    except BaseException as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(where) if frame.filename == script), 0)
        answer = [False, f"{type(error).__name__} at line {line}: {str(error)[:1500]}"]
    path.write_text(json.dumps(answer), encoding="utf-8")


def _show(one: Case, answer: Answer, lock: AbstractContextManager[Any]) -> None:
    mark = "as expected" if answer.as_expected else "NOT AS EXPECTED"
    with lock:
        print(f"\n{one.number:>4}  {one.name}  {answer.seconds:.1f} s  {mark}")
        for label, text in (("expected", one.expected), ("seen", answer.seen)):
            print(textwrap.fill(f"{label:>8}: {text}", 110, initial_indent="  ", subsequent_indent=" " * 12))
        sys.stdout.flush()


def main(script: str, description: str | None) -> int:
    """The command line of ``script``, whose cases are registered. Returns the exit status."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=about)
    parser.add_argument("names", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, help="for each case, instead of its own limit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.names) - CASES.keys()
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    chosen = [CASES[name] for name in options.names] or list(CASES.values())
    if options.answer is not None:
        _answer(script, chosen[0], options.answer)
        return 0
    if options.device == "cuda" and not torch.cuda.device_count():
        parser.error("this machine has no GPU; --device cpu is a dry run")
    found: dict[str, Answer] = {}
    lock = threading.Lock()

    def run(one: Case) -> None:
        found[one.name] = _run(script, one, options.device, options.seconds)
        _show(one, found[one.name], lock)

    with ThreadPoolExecutor(AT_ONCE if options.device == "cuda" else 1) as pool:
        list(pool.map(run, [one for one in chosen if not one.alone]))
    for one in chosen:
        if one.alone:
            run(one)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU"
    failed = [answer.name for answer in found.values() if not answer.as_expected]
    print(
        f"\n{len(found) - len(failed)} of {len(found)} cases as expected on {name}, torch {torch.__version__}"
    )
    if failed:
        print(f"not as expected: {', '.join(failed)}")
    if options.json is not None:
        rows = [{"case": one.number, "expected": one.expected, **found[one.name]._asdict()} for one in chosen]
        about_run = {"device": name, "torch": torch.__version__, "cases": rows}
        options.json.write_text(json.dumps(about_run, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0
