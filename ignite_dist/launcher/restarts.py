"""The entry point of a worker, and new attempts after a failure."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ignite_dist.comp_models.launcher import Launcher
from ignite_dist.context import live
from ignite_dist.diagnostics import announcing, watchdog
from ignite_dist.errors import RankFailedError
from ignite_dist.internals.arguments import keywords_of
from ignite_dist.workers import process_end
from ignite_dist.workers.failures import failure_of
from ignite_dist.workers.output import fill_standard_files
from ignite_dist.workers.supervisor.attempts import JOB_ID_VARIABLE, Attempts
from ignite_dist.workers.unsent_parts import UserCall

_logger = logging.getLogger(__name__)

_VARIABLE = "IGNITE_DIST_RESTART_COUNT"


def restart_count() -> int:
    """How often this job has been started again after a failure: 0 in the first attempt.

    Under torchrun, the number of torchrun's restarts on this node. The environment variable
    ``IGNITE_DIST_JOB_ID`` (under torchrun, ``TORCHELASTIC_RUN_ID``) is the same in all attempts of a job, on
    all ranks (XLA: of a host). It tells the job's checkpoint from that of an earlier job.

    Example::

        if idist.restart_count() > 0:
            checkpoint = torch.load("last.pt", weights_only=True)
    """
    return int(os.environ.get(_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


class Entry(UserCall):
    """The entry point of a worker: make the context, call the user's function, end the context.

    Attributes:
        restart_count: the result of :func:`restart_count` in the worker.
        job_id: of this launcher.
    """

    def __init__(
        self, backend: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(function, args, kwargs)
        self.backend = backend
        self.restart_count = 0
        self.job_id = ""
        self.comparison = announcing.comparison_in_new_contexts()  # set by compare_calls() in the launcher

    def __call__(self, local_rank: int, **initialize_kwargs: Any) -> Any:  # noqa: D102
        os.environ[_VARIABLE] = str(self.restart_count)
        os.environ.setdefault(JOB_ID_VARIABLE, self.job_id)  # on several nodes that of node 0 is there
        announcing.set_comparison_in_new_contexts(self.comparison)
        process_end.call_at_failure(live.abort)
        live.initialize(self.backend, **initialize_kwargs)
        watchdog.watch_this_rank()
        num_before = _num_collectives()
        try:
            result = self.function(local_rank, *self.args, **self.kwargs)
        except (ImportError, SyntaxError) as error:
            return failure_of(error, is_permanent=True)
        except (TypeError, NameError) as error:
            return failure_of(error, is_permanent=_num_collectives() == num_before)
        live.conclude()
        return result


def _num_collectives() -> tuple[int, int]:
    """Numbers of collectives that the backend has begun, and that this rank has called."""
    model = live.current_model()
    recorder = announcing.recorder_of(model)
    return (
        model.transport.num_collectives(),
        0 if recorder is None else recorder.log_of(model.get_rank()).num_calls,
    )


def start(launcher: type[Launcher], entry: Entry, max_restarts: int, **options: Any) -> Any:
    """Start workers that run ``entry``, and start all of them again after a failure.

    On several nodes, the launcher of node 0 decides for all: see :mod:`ignite_dist.workers.supervisor.nodes`.

    Raises:
        RankFailedError: the last attempt has failed, or another attempt would fail in the same way.
    """
    fill_standard_files()
    attempts = Attempts(max_restarts)
    entry.job_id = attempts.job_id
    if "attempts" in keywords_of(launcher.start):
        options["attempts"] = attempts
    try:
        while True:
            try:
                return launcher.start(entry, **options)
            except RankFailedError as error:
                failure = error
            if not attempts.agree_on_restart(failure):
                raise failure
            entry.restart_count = attempts.num_restarts
            _logger.warning(
                "Restart %d of at most %d, because the job has failed. %s",
                entry.restart_count,
                max_restarts,
                failure,
            )
    except BaseException:  # Ctrl-C, for example
        attempts.close()
        raise


def check_max_restarts(launcher: type[Launcher], max_restarts: Any, options: dict[str, Any]) -> None:
    """Raise for a ``max_restarts`` that is not an int >= 0, or that ``options`` do not support."""
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts must be an int >= 0, got {max_restarts!r}.")
    if not max_restarts:
        return
    if not options.get("join", True):
        raise ValueError("max_restarts needs join=True: spawn starts the workers again while it waits.")
    if (options.get("nnodes") or 1) == 1:
        return
    if not launcher.restarts_several_nodes:
        raise ValueError(
            "With this backend, max_restarts is for one machine: its launchers do not talk to each other."
        )
    if options.get("init_method") not in (None, "env://"):
        raise ValueError(
            "max_restarts with nnodes > 1 needs master_addr and master_port instead of init_method: the "
            "launchers of all machines connect there, to agree on each restart."
        )
