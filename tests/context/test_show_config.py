"""show_config: what a user is shown of the context."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

import helpers
import ignite_dist as idist
from contexts import SHORT, by_test_rank, my_rank
from ignite_dist.comp_models.shared_memory import opening as shared_memory

# --- show_config -------------------------------------------------------------------------------------


SERIAL_LINES = [
    "distributed configuration: serial",
    "backend: None",
    "device: cpu",
    "shared memory: no",
    "rank: 0",
    "local rank: 0",
    "world size: 1",
]


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(None, id="logging-not-configured"),
        pytest.param("WARNING", id="root-at-warning", marks=pytest.mark.long),
    ],
)
def test_show_config_is_visible(level: str | None) -> None:
    configure = f"logging.basicConfig(level=logging.{level}); " if level else ""
    source = f"import logging, ignite_dist as idist; {configure}idist.show_config(); print(idist.hostname())"
    ended = subprocess.run(
        [helpers.python_that_forks(), "-c", source],
        env=helpers.plain_environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0
    for line in SERIAL_LINES:
        assert len(re.findall(rf": ?{re.escape(line)}$", ended.stderr, re.MULTILINE)) == 1, ended.stderr
    assert ended.stdout.strip() == socket.gethostname()


def test_show_config_goes_through_logging_and_leaves_no_handler(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [
        logging.getLogger(),
        logging.getLogger("ignite_dist"),
        logging.getLogger("ignite_dist.context"),
    ]
    before = [list(logger.handlers) for logger in loggers]
    idist.show_config()
    assert [list(logger.handlers) for logger in loggers] == before
    messages = [record.getMessage() for record in caplog.records]
    for line in SERIAL_LINES:
        assert messages.count(line) == 1
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert {record.name.partition(".")[0] for record in caplog.records} == {"ignite_dist"}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _show_config_on_one_rank_alone(method: str) -> list[str]:
    dist.init_process_group("gloo", init_method=method, rank=my_rank(), world_size=2, timeout=SHORT)
    handler = _Lines()
    logging.getLogger().addHandler(handler)
    if my_rank() == 0:
        idist.show_config()  # the other rank does not call it, so it must not communicate
    dist.barrier()
    if my_rank() == 1:
        idist.show_config()
    idist.finalize()
    return handler.lines


def test_show_config_never_communicates_and_says_what_is_not_known_yet(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/x"
    first, second = helpers.run_ranks(_show_config_on_one_rank_alone, method, environs=by_test_rank())
    for line in ("distributed configuration: native-dist", "backend: gloo", "world size: 2", "rank: 0"):
        assert line in first
    assert any(line.startswith("local rank: ") and "not known" in line for line in first)
    assert "shared memory: not known yet" in first
    assert second == []


def _shown_after_a_barrier(local_rank: int) -> list[str]:
    handler = _Lines()
    logging.getLogger().addHandler(handler)
    idist.barrier()
    idist.show_config()
    return handler.lines


@pytest.mark.parametrize("variable", ["0", "1"])
def test_show_config_says_whether_the_ranks_share_memory(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(shared_memory.VARIABLE, variable)
    shown = "no" if shared_memory.unavailable_reason() else "yes"
    assert shown == "no" or variable == "1"
    lines, _ = idist.spawn("gloo", _shown_after_a_barrier, nproc_per_node=2, timeout=SHORT)
    assert f"shared memory: {shown}" in lines
