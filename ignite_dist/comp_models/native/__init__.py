"""torch.distributed: gloo, NCCL, MPI, and other backends that are registered with torch."""

from __future__ import annotations

from ignite_dist.comp_models.native.model import NativeModel

__all__ = ["NativeModel"]
