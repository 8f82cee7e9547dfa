"""Detect parameters that are unfrozen after ``auto_model``: no rank would average their gradients."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ignite_dist import _torch
from ignite_dist.comp_models import ComputationModel

# Keyed by parameter.
_hook_handles: Any = WeakTensorKeyDictionary()


def watch_frozen(live: ComputationModel, module: Module, wrapped: Module, is_averaged_later: bool) -> None:
    """Make backward passes raise if they compute a gradient for a parameter that is frozen now.

    The hooks cost nothing while the parameters stay frozen. Hooks of an earlier call are removed.

    Args:
        live: the context.
        module: the module without its wrapper.
        wrapped: the module with its wrapper.
        is_averaged_later: True if a parameter that is unfrozen later has equal values on all ranks and its
            gradient is averaged.
    """
    ignored = _torch.ignored_by_ddp(module)
    wrapper = wrapped if isinstance(wrapped, DistributedDataParallel) else None
    for name, parameter in module.named_parameters():
        handle = _hook_handles.pop(parameter, None)
        if handle is not None:
            handle.remove()
        can_be_trained = parameter.is_floating_point() or parameter.is_complex()
        if parameter.requires_grad or not can_be_trained or parameter.is_inference():
            continue
        if is_averaged_later or name in ignored:
            continue
        hook = _RaisingHook(live, f"{name!r} of {type(module).__name__}", wrapper)
        parameter.requires_grad_(True)  # torch accepts such a hook only then
        try:
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            _hook_handles[parameter] = handle
        finally:
            parameter.requires_grad_(False)


class _RaisingHook:
    """A hook that raises if no rank will average the computed gradient."""

    def __init__(self, live: ComputationModel, name: str, wrapper: DistributedDataParallel | None) -> None:
        self._live = weakref.ref(live)
        self._name = name
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    def __call__(self, parameter: Tensor) -> None:
        live = self._live()
        if live is None or not live.is_current():
            return
        if self._wrapper is not None:
            wrapper = self._wrapper()
            # In no_sync() gradients are meant to be local. FORCED_SYNC averages all gradients itself.
            if wrapper is None or not wrapper.require_backward_grad_sync:
                return
        raise RuntimeError(
            f"{self._name} was frozen when auto_model received the model, so its gradients would not be "
            "averaged. Unfreeze the parameter, then call model = idist.auto_model(idist.unwrap_model(model)) "
            "again and make a new optimizer."
        )
