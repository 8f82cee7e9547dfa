"""The arguments and the exit status of the command line.

Exit status 0: success. 1: a failure. 2: wrong arguments or environment variables. 130: Ctrl-C. A script's own
status is that of its rank that failed first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import ignite_dist as idist
from ignite_dist.cli import jobs
from ignite_dist.cli.output import Output, results_on_stdout

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        redirects = options.command is not _run  # a script's output is its own
        with results_on_stdout(options.json, redirects) as output:
            try:
                status: int = options.command(options, output)
                return status
            except (Exception, KeyboardInterrupt) as error:
                status, text = _status_and_message(error, runs_script=options.command is _run)
                if options.json and _prints_results():
                    output.json({"ok": False, "error": text})
                sys.stderr.write(f"ignite-dist: {text}\n")
                return status
    except BrokenPipeError:  # for example with `| head`
        return _FAILED


def _status_and_message(error: BaseException, runs_script: bool) -> tuple[int, str]:
    """The exit status and the message for ``error``. Raises an unexpected error again."""
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED, "interrupted."
    if runs_script and isinstance(error, idist.RankFailedError):
        return _status_of_script(error), str(error).rstrip()
    if isinstance(error, (idist.RankFailedError, idist.MissingRanksError)):
        return _FAILED, jobs.error_message(error).rstrip()
    if isinstance(error, (ValueError, TypeError, idist.LaunchError, idist.EnvironmentVariablesError)):
        return _USAGE, str(error).rstrip()
    if isinstance(error, RuntimeError):
        return _FAILED, f"{type(error).__name__} on {idist.hostname()}: {error}".rstrip()
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # a file that cannot be written
        return _FAILED, str(error)
    raise error


def _status_of_script(error: idist.RankFailedError) -> int:
    """The exit status of the rank that failed first. After a signal that of a shell: 128 and the number."""
    code: int | None = getattr(error, "exit_code", None)
    if error.error_type == KeyboardInterrupt.__name__:  # Python then ends itself by SIGINT
        return _INTERRUPTED
    if not code:
        return _FAILED
    return code if code > 0 else 128 - code


# --- the arguments -----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose error messages have one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE, f"{self.prog}: {message}\n")


# Ours, torchrun's, and that of mpirun and horovodrun.
_NPROC_PER_NODE = ("--nproc-per-node", "--nproc_per_node", "-np")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ignite-dist",
        description="Show what this machine has, check that a set-up works, and measure how fast it is.",
        epilog="check and bench start processes, or join the processes of a launcher: "
        "torchrun --nproc-per-node 2 -m ignite_dist check",
    )
    parser.add_argument("--version", action="version", version=f"ignite_dist {idist.__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="env | check | bench | run | ..."
    )
    common, ranks = _common_arguments(), _arguments_of_ranks()
    env = commands.add_parser("env", parents=[common], help="versions, backends, devices, the launcher")
    env.set_defaults(command=_env)
    check = commands.add_parser(
        "check", parents=[common, ranks], help="run every collective with every dtype"
    )
    check.set_defaults(command=_check)
    bench = commands.add_parser(
        "bench", parents=[common, ranks], help="latency and bandwidth, compared with torch.distributed"
    )
    bench.add_argument(
        "--sizes",
        default="4:64M:4",
        help="in bytes: from:to, from:to:factor or a list, 4,1K,16M (%(default)s)",
    )
    bench.add_argument(
        "--collectives",
        default="",
        metavar="NAMES",
        help="for example all_reduce,barrier (all but reduce_scatter and all_to_all)",
    )
    bench.add_argument(
        "--dtype",
        default="float32",
        choices=("float16", "bfloat16", "float32", "float64"),
        help="of the tensors (%(default)s)",
    )
    bench.add_argument(
        "--save", metavar="FILE", help="draw a chart and save it to FILE, for example chart.png"
    )
    bench.set_defaults(command=_bench)
    _add_run(commands)
    timeline = commands.add_parser(
        "timeline", parents=[common], help="who waits for whom, from the file of a timeline"
    )
    timeline.add_argument("trace", help="a file that idist.record_timeline() or `run --timeline` has written")
    timeline.add_argument(
        "--save", metavar="FILE", help="draw a picture and save it to FILE, for example picture.png"
    )
    timeline.set_defaults(command=_timeline)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run", parents=[_arguments_of_nodes()], help="run a script on every rank: run script.py [arguments]"
    )
    run.add_argument("--backend", default="auto", help="a backend that `env` shows (%(default)s)")
    run.add_argument(
        *_NPROC_PER_NODE,
        type=_int_or_auto,
        default="auto",
        metavar="N",
        help="processes on this machine (%(default)s: one per GPU, else per core)",
    )
    run.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="new attempts after a failure (%(default)s)"
    )
    run.add_argument("--prefix", action="store_true", help="put [rank 1] before each line of output")
    run.add_argument(
        "--timeline", metavar="FILE", help="record the script's collectives to FILE, for example trace.json"
    )
    run.add_argument("-m", "--module", action="store_true", help="`script` is a module, as with python -m")
    run.add_argument("script", help="a Python file, or - for stdin; needs no code to start a context")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    run.set_defaults(command=_run, json=False)


def _int_or_auto(text: str) -> Any:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"must be a number or 'auto', got {text!r}")


def _common_arguments() -> _Parser:
    parser = _Parser(add_help=False)
    parser.add_argument("--json", action="store_true", help="results as JSON")
    return parser


def _arguments_of_ranks() -> _Parser:
    """The arguments of the commands that run on several ranks."""
    parser = _Parser(add_help=False, parents=[_arguments_of_nodes()])
    parser.add_argument("--backend", default="auto", help="a backend that `env` shows (%(default)s)")
    parser.add_argument(
        *_NPROC_PER_NODE,
        type=int,
        metavar="N",
        help="processes on this machine, without a launcher (one per GPU over NCCL, else 2)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default="60", metavar="S", help="seconds to wait for a rank (%(default)s)"
    )
    return parser


def _arguments_of_nodes() -> _Parser:
    parser = _Parser(add_help=False)
    parser.add_argument("--nnodes", type=int, metavar="N", help="machines; run the command on each")
    parser.add_argument("--node-rank", type=int, metavar="I", help="number of this machine, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="address of machine 0")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="a free port of machine 0")
    return parser


def _seconds(text: str) -> timedelta:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds < 1e9:  # a store rounds timeouts to milliseconds
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return timedelta(seconds=seconds)


def _nodes(options: argparse.Namespace) -> dict[str, Any]:
    names = ("nnodes", "node_rank", "master_addr", "master_port")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _job(options: argparse.Namespace) -> jobs.Job:
    backend = jobs.auto_backend(options.nproc_per_node) if options.backend == "auto" else options.backend
    return jobs.Job(backend, options.timeout, options.nproc_per_node, _nodes(options))


def _log_on_rank_0(output: Output, text: str) -> None:
    if _prints_results():
        output.log(text)


# --- the commands ------------------------------------------------------------------------------------


def _env(options: argparse.Namespace, output: Output) -> int:
    from ignite_dist.cli.env import show_env

    if _prints_results():
        show_env(output)
    return 0


def _prints_results() -> bool:
    """True on rank 0 of a launcher's processes; True if there is no launcher."""
    try:
        return idist.environment().rank == 0
    except idist.EnvironmentVariablesError:
        return True


def _check(options: argparse.Namespace, output: Output) -> int:
    from ignite_dist.cli.check import check
    from ignite_dist.cli.show_check import show_check

    log = partial(_log_on_rank_0, output)
    return jobs.run(_job(options), check, partial(show_check, output=output), log)


def _bench(options: argparse.Namespace, output: Output) -> int:
    from ignite_dist.cli import chart
    from ignite_dist.cli.bench import Bench, parse_collectives, parse_sizes
    from ignite_dist.cli.show_bench import show_bench

    if options.save is not None:
        chart.check_file(options.save)
    bench = Bench(parse_collectives(options.collectives), parse_sizes(options.sizes), options.dtype)
    log = partial(_log_on_rank_0, output)
    log(bench.announcement)
    return jobs.run(_job(options), bench, partial(show_bench, output=output, save=options.save), log)


def _run(options: argparse.Namespace, output: Output) -> int:
    from ignite_dist.cli.run import run

    spawn_options = {"max_restarts": options.max_restarts, "prefix_output": options.prefix}
    spawn_options = {name: value for name, value in spawn_options.items() if value}
    return run(
        options.script,
        options.arguments,
        options.module,
        options.backend,
        options.nproc_per_node,
        {**_nodes(options), **spawn_options},
        options.timeline,
    )


def _timeline(options: argparse.Namespace, output: Output) -> int:
    from ignite_dist.cli.timeline import show_timeline

    show_timeline(options.trace, output, options.save)
    return 0
