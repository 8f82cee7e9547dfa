"""Parameters that were frozen when ``auto_model`` saw them, and would be each rank's own if trained later."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ignite_dist import _torch
from ignite_dist.comp_models import ComputationModel

__all__ = ["watch_frozen"]

# The handles of the hooks, by parameter.
_watched: Any = WeakTensorKeyDictionary()


def watch_frozen(live: ComputationModel, module: Module, wrapped: Module, is_averaged_later: bool) -> None:
    """Make a backward pass raise that computes a gradient for what is frozen now.

    It costs nothing while that stays frozen. What an earlier call has said of the parameters is forgotten.

    Args:
        live: the context.
        module: without its wrapper.
        wrapped: with it.
        is_averaged_later: whether a parameter of ``module`` that is unfrozen later begins with the same value
            on every rank, and is averaged.
    """
    ignored = _torch.ignored_by_ddp(module)
    wrapper = wrapped if isinstance(wrapped, DistributedDataParallel) else None
    for name, parameter in module.named_parameters():
        handle = _watched.pop(parameter, None)
        if handle is not None:
            handle.remove()
        can_be_trained = parameter.is_floating_point() or parameter.is_complex()
        if parameter.requires_grad or not can_be_trained or parameter.is_inference():
            continue
        if is_averaged_later or name in ignored:
            continue
        refusal = _Refusal(live, f"{name!r} of {type(module).__name__}", wrapper)
        parameter.requires_grad_(True)  # torch takes a hook for no other
        try:
            _watched[parameter] = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                refusal
            )
        finally:
            parameter.requires_grad_(False)


class _Refusal:
    """A hook that raises when a gradient has come that nobody will average."""

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
            # In no_sync() the gradients are each rank's own by intent; FORCED_SYNC averages all of them.
            if wrapper is None or not wrapper.require_backward_grad_sync:
                return
        raise RuntimeError(
            f"{self._name} was frozen when auto_model got the model, so its gradients would be each rank's "
            "own. Unfreeze it, then call model = idist.auto_model(idist.unwrap_model(model)) (it may be "
            "called again), and make the optimizer."
        )
