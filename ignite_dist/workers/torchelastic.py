"""Report an error to torchrun, whose summary then shows the root cause and its traceback.

torchrun shows the failure with the earliest time (in whole seconds) as the root cause. A rank reports its
error and the time in the file ``TORCHELASTIC_ERROR_FILE``. Without this file, torchrun takes the time when it
notices the rank's end: https://docs.pytorch.org/docs/stable/elastic/errors.html
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ignite_dist.environments.rendezvous import connections
from ignite_dist.workers.failures import is_consequence

_logger = logging.getLogger(__name__)

# torchrun polls its workers every 0.1 s (--monitor-interval).
_SECONDS_UNTIL_ENDED = 3.0


@contextmanager
def report_to_torchrun(error: BaseException | None) -> Iterator[None]:
    """Report ``error`` to torchrun. The block ends this rank's context.

    No effect without torchrun, or if the error file exists already (``@record`` has written it, for example).

    A root cause is reported before the ``with`` block runs, a consequence some seconds after the block.
    torchrun ends all ranks at the first failure. If this rank still runs then, the root cause is not a
    failure on this node: a rank ended too early, or a rank failed on another node.
    """
    if error is None or not _is_report_needed():
        yield
    elif is_consequence(error):
        yield
        error = connections.with_cause(error)
        _logger.error("Another rank has failed or is gone. torchrun will end this rank.", exc_info=error)
        time.sleep(_SECONDS_UNTIL_ENDED)
        _record(error)
    else:
        _record(error)  # before the connections close and the peers notice
        yield


def _is_report_needed() -> bool:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return path != "" and not os.path.exists(path)


def _record(error: BaseException) -> None:
    if isinstance(error, SystemExit) and not error.code:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
