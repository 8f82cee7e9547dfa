"""The Horovod backend."""

from __future__ import annotations

from ignite_dist.comp_models.horovod.model import HorovodModel

__all__ = ["HorovodModel"]
