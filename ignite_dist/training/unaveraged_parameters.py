"""Detect gradients that nothing averages.

A parameter that is unfrozen after ``auto_model`` is an error. The rest is a warning of the first step only:
an expert or a pipeline stage, for example, is trained on each rank for itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel
from ignite_dist.context.live import current_model
from ignite_dist.data.model_buffers import remembered_models
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.values.gradients import parameters_of, take_mark

# --- parameters that are unfrozen after auto_model -----------------------------------------------------

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
    _received.pop(module, None)
    if wrapper is not None:
        received = _received[module] = WeakTensorKeyDictionary()
        received.update({parameter: _kind(parameter) for parameter in module.parameters()})
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


# --- gradients that nothing averages ---------------------------------------------------------------------

# The parameters of each module when DDP wrapped it, and their kinds.
_received: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    """If one of these changes, torch drops the hooks of the parameter."""
    return parameter.dtype, parameter.device


def watch_first_step(optimizer: Optimizer) -> None:
    """Warn after the first step of ``optimizer`` if nothing has averaged a gradient. Never communicates.

    Only for backends whose models average gradients, and not their optimizers.
    """
    if not any(isinstance(hook, _FirstStep) for hook in _torch.step_hooks(optimizer)[1].values()):
        optimizer.register_step_post_hook(_FirstStep())


class _FirstStep:
    """A step hook that acts once."""

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_first:
            return
        self._is_first = False
        live = current_model()
        if live.get_world_size() == 1 or take_mark(optimizer):  # the script has averaged them itself
            return
        own = [
            parameter
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None and not is_sharded(parameter)
        ]
        models = remembered_models(live)
        if outside := _outside(own, models):
            of_script = _wrapped_by_the_script()
            models = [*models, *of_script]
            outside = _outside(outside, of_script)
        models = [model for model in models if len(_outside(own, [model])) < len(own)]
        name = type(optimizer).__name__
        if outside:
            _warn(f"This {name} trains parameters that are in no model of auto_model", outside, _PUT_THROUGH)
        elif changed := _changed(own, models):
            _warn(f"This {name} trains parameters that were changed after auto_model", changed, _CHANGE_FIRST)
        elif own and _torch.number_of_backward_pass() >= 0:
            _warn(f"This {name} makes its step inside of a backward pass", own, _AFTER_PASS)
        elif not all(map(live.training.has_seen_pass, models)):
            _warn(f"This {name} makes a step with gradients of no backward pass", own, _AVERAGE)


_PUT_THROUGH = (
    "To average their gradients, put their module through auto_model too, and keep what it returns (for "
    "single parameters: shared = idist.auto_model(torch.nn.ParameterList([temperature])))."
)
_CHANGE_FIRST = (
    "model.to() with another dtype or device, load_state_dict(assign=True) and new layers come before "
    "auto_model. Or call model = idist.auto_model(idist.unwrap_model(model)) again, and make a new optimizer."
)
_AFTER_PASS = "DistributedDataParallel averages the gradients at the end of the pass: make the step after it."
_AVERAGE = (
    "Gradients of torch.autograd.grad or torch.func.grad are each rank's own. Unless the script averages "
    "them, assign them in the block of idist.grad_sync(model, strategy=idist.DDPSyncStrategy.FORCED_SYNC)."
)


def _warn(what: str, parameters: list[Any], advice: str) -> None:
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:5])
    more = ", ..." if len(parameters) > 5 else ""
    warn_user(f"{what}, so each rank may train its own. Their shapes: {shapes}{more}. {advice}")


def _changed(parameters: list[Any], models: Iterable[Module]) -> list[Any]:
    """Those that have another kind than when DDP wrapped their model, or were not there."""
    trained = {id(parameter) for parameter in parameters}
    return [
        parameter
        for model in models
        if (received := _received.get(model)) is not None
        for parameter in model.parameters()
        if id(parameter) in trained and received.get(parameter) != _kind(parameter)
    ]


def _outside(parameters: list[Any], models: Iterable[Module]) -> list[Any]:
    inside = {id(parameter) for model in models for parameter in model.parameters()}
    return [parameter for parameter in parameters if id(parameter) not in inside]


def _wrapped_by_the_script() -> list[Module]:
    return [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
