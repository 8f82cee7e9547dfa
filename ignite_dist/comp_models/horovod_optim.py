"""``hvd.DistributedOptimizer``, for a current torch.

Horovod 0.28.1 is older than ``zero_grad(set_to_none=...)``, and some of what torch's own optimizers promise
got lost in its wrapper. Each method here says what it mends.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["distribute", "load_state", "state_as_bytes"]


def distribute(optimizer: Optimizer, **kwargs: Any) -> Optimizer:
    """``optimizer`` with gradients that are averaged over all ranks before each step.

    It shares the parameter groups, the state, the defaults and the hooks of ``optimizer``.

    Args:
        optimizer: any; one that Horovod has wrapped already is returned as it is.
        kwargs: those of ``hvd.DistributedOptimizer``.
    """
    import horovod.torch as hvd

    if hasattr(optimizer, "skip_synchronize"):
        return optimizer
    wrapped = hvd.DistributedOptimizer(optimizer, **kwargs)
    # Horovod makes it anew from the parameters alone, and so loses what was loaded, registered or defaulted.
    # `step` may be there because a scheduler has replaced it, on the optimizer without Horovod.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    # Horovod has just made this class for this optimizer, and calls super(self.__class__, self), so its
    # methods can be replaced but not inherited.
    made, plain = type(wrapped), type(optimizer)
    made.zero_grad = _zero_grad(made.zero_grad, plain)
    if kwargs.get("op") != hvd.Adasum:
        made.step = _step(inspect.unwrap(made.step))
        made.add_param_group = _add_param_group(plain)
    return wrapped  # type: ignore[no-any-return]


def _zero_grad(horovods: Callable[..., None], plain: type[Optimizer]) -> Callable[..., None]:
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Forget the gradients; refused while they are being reduced."""
        if self._handles:
            horovods(self)  # raises
        plain.zero_grad(self, set_to_none)

    return zero_grad


def _step(horovods: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients and make a step; those that ``closure`` makes, each time it is called."""
        if closure is None or not self._should_synchronize:
            return horovods(self, closure)

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        # Horovod itself would average what there is before the closure makes the gradients.
        with self.skip_synchronize():
            result = horovods(self, averaged)
        self._synchronized = False
        return result

    return step


def _add_param_group(plain: type[Optimizer]) -> Callable[..., None]:
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add parameters; Horovod itself would leave their gradients as they are on each rank."""
        plain.add_param_group(self, param_group)
        groups = self.param_groups
        for position, parameter in enumerate(groups[-1]["params"]):
            self._parameter_names[parameter] = f"allreduce.noname.{len(groups) - 1}.{position}"
            self._allreduce_delay[parameter] = self.backward_passes_per_step
        self.param_groups = groups[-1:]  # _register_hooks would add a second hook to all the others
        try:
            if self.process_set.included() and self.process_set.size() > 1:
                self._register_hooks()
        finally:
            self.param_groups = groups

    return add_param_group


# --- the state, which hvd.broadcast_optimizer_state would change: it makes a step to have one ------------


def state_as_bytes(optimizer: Optimizer) -> bytes:
    """The optimizer's state, with its tensors; see :func:`load_state`."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def load_state(optimizer: Optimizer, state: bytes | memoryview) -> None:
    """Give ``optimizer`` the state of another, whose parameters are the same."""
    # Onto the CPU first: a tensor would go to the device of the rank that it comes from.
    optimizer.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=False))
