"""Start workers, or join the processes of another launcher."""

from ignite_dist.launcher.parallel import Parallel
from ignite_dist.launcher.spawning import spawn

__all__ = ["Parallel", "spawn"]
