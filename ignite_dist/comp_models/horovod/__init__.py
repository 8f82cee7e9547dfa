"""Horovod: its own ranks, background thread and collectives."""

from __future__ import annotations

from ignite_dist.comp_models.horovod.model import HorovodModel

__all__ = ["HorovodModel"]
