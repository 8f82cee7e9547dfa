"""XLA devices: replicas in processes, or in threads of one process."""

from __future__ import annotations

from ignite_dist.comp_models.xla.model import XlaModel

__all__ = ["XlaModel"]
