"""What torchrun's summary of a failure shows: the rank that failed first, and its traceback.

torchrun takes the failure with the earliest time for the root cause, in whole seconds, and shows what that
rank has written into the file that ``TORCHELASTIC_ERROR_FILE`` names. A rank without one is dated when
torchrun notices its end: https://docs.pytorch.org/docs/stable/elastic/errors.html
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ignite_dist.rendezvous import connections
from ignite_dist.workers.failures import is_consequence

__all__ = ["recorded"]

_logger = logging.getLogger(__name__)

# torchrun looks at its workers every 0.1 s (--monitor-interval).
_SECONDS_TO_BE_ENDED = 3.0


@contextmanager
def recorded(error: BaseException | None) -> Iterator[None]:
    """Around the end of this rank's context: tell torchrun of ``error``, which is being handled.

    Without torchrun it does nothing, nor where somebody has told already: ``@record`` in the script, say.

    A consequence is told last. torchrun ends all ranks when it sees the first failure, so this rank stays
    for a moment. If it is still there then, no rank of this node has failed (one may have left too early, or
    failed on another node), and ``error`` is the first thing that torchrun hears of here.
    """
    if error is None or not _is_awaited():
        yield
    elif is_consequence(error):
        yield
        error = connections.explained(error)
        _logger.error("Another rank has failed or gone, and torchrun will end this one.", exc_info=error)
        time.sleep(_SECONDS_TO_BE_ENDED)
        _record(error)
    else:
        _record(error)  # before the connections close, by which the others notice
        yield


def _is_awaited() -> bool:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return path != "" and not os.path.exists(path)


def _record(error: BaseException) -> None:
    if isinstance(error, SystemExit) and not error.code:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
