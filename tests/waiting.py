"""Call a function as soon as a thread waits for another rank in shared memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Where a rank sleeps for another one, and where a thread waits for the thread that uses the memory: the end
# of a path, and a function.
SLEEP = "shared_memory/segment.py", "_sleep"
RUN = "shared_memory/collectives.py", "run"


def when_waiting(function: Callable[[], Any], place: tuple[str, str] = SLEEP) -> None:
    """Call ``function`` in another thread as soon as the main thread is at ``place``."""

    def look() -> None:
        wait_until_at(place, threading.main_thread())
        function()

    threading.Thread(target=look, daemon=True).start()


def wait_until_at(place: tuple[str, str], thread: threading.Thread) -> None:
    """Return when ``thread`` is at ``place``."""
    while not _is_at(place, thread):
        time.sleep(0.001)


def _is_at(place: tuple[str, str], thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(place[0]) and frame.f_code.co_name == place[1]:
            return True
        frame = frame.f_back
    return False
