"""``check`` across machines: which of them is slow, and which has not come."""

from __future__ import annotations

import subprocess

import pytest

from machines import machines, needs_namespaces

pytestmark = pytest.mark.long


@pytest.mark.launchers
@needs_namespaces
def test_check_names_the_slow_host() -> None:
    with machines(3) as hosts:
        # Ten times slower than gloo gets between the others even on a busy machine.
        shaping = ["root", "tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms"]
        subprocess.run(
            ["tc", "-n", hosts[1].namespace, "qdisc", "add", "dev", "eth0", *shaping], check=True, timeout=30
        )
        place = ["--nnodes", "3", "--master-addr", hosts[0].address, "--master-port", "29512"]
        running = [
            host.python("-m", "ignite_dist", "check", *place, "--node-rank", node_rank, "--nproc-per-node", 1)
            for node_rank, host in enumerate(hosts)
        ]
        ended = [job.end(250) for job in running]
    assert [status for status, _ in ended] == [0, 0, 0], ended
    report = ended[0][1]
    assert "gloo, 3 processes on 3 hosts" in report
    # On a busy machine another one may be slow to answer as well.
    slow = [line.split()[4] for line in report.splitlines() if line.startswith("SLOW")]
    assert hosts[1].name in slow and len(slow) < 3, report
    assert "All is well" not in ended[1][1]  # the first machine alone prints
