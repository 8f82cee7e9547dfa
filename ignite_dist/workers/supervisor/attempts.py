"""The attempts of a job: how often all workers start again after a failure."""

from __future__ import annotations

import secrets

from ignite_dist.environments.rendezvous import stores
from ignite_dist.errors import RankFailedError
from ignite_dist.workers.supervisor.nodes import Nodes

JOB_ID_VARIABLE = "IGNITE_DIST_JOB_ID"
"""The environment variable of all workers of a job with the job's id, which is the same in all attempts."""


class Attempts:
    """The attempts of a job. On several nodes, all launchers make the same attempts.

    Attributes:
        max_restarts: the largest number of restarts.
        num_restarts: the number of restarts until now.
        job_id: of the launcher. All nodes use that of node 0.
        nodes: the nodes of the current attempt. Set by a launcher that connects to other nodes, else None.
    """

    def __init__(self, max_restarts: int = 0) -> None:
        self.max_restarts = max_restarts
        self.num_restarts = 0
        self.job_id = secrets.token_hex(8)
        self.nodes: Nodes | None = None

    def agree_on_restart(self, error: RankFailedError) -> bool:
        """True if the job starts again after ``error``. Waits for the launchers of the other nodes."""
        is_wanted = self.num_restarts < self.max_restarts and not error.is_permanent
        if self.nodes is not None:
            self.nodes = self.nodes.next_attempt(is_wanted, stores.serve_store)
            is_wanted = self.nodes is not None
        self.num_restarts += is_wanted
        return is_wanted

    def close(self) -> None:
        """Close the connections to the other nodes: this launcher makes no further attempt."""
        if self.nodes is not None:
            self.nodes.close()
