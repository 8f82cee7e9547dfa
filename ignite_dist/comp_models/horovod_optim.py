"""``hvd.DistributedOptimizer``, for a current torch.

Horovod 0.28.1 is older than ``zero_grad(set_to_none=...)``, and some of what torch's own optimizers promise
got lost in its wrapper. Each function here says what it mends.
"""

from __future__ import annotations

import inspect
import io
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_dist.averaged import parameters_of, take_mark

__all__ = ["accumulating", "distribute", "load_state", "state_as_bytes"]

_NEVER = 1 << 60  # backward passes until the gradients are sent


def distribute(optimizer: Optimizer, name: str, **kwargs: Any) -> Optimizer:
    """``optimizer`` with gradients that are averaged over all ranks before each step.

    It shares the parameter groups, the state, the defaults and the hooks of ``optimizer``.

    Args:
        optimizer: any; one that Horovod has wrapped already is returned as it is.
        name: the same on every rank, and of no other optimizer. Horovod itself gives the parameters of all
            optimizers the same names, and then cannot take two of them in one backward pass.
        kwargs: those of ``hvd.DistributedOptimizer``.
    """
    import horovod.torch as hvd

    if hasattr(optimizer, "skip_synchronize"):
        if kwargs:
            raise ValueError(
                f"The optimizer is Horovod's already, so {', '.join(kwargs)} would have no effect."
            )
        return optimizer
    if kwargs.get("named_parameters") is None:
        kwargs["named_parameters"] = _names(name, optimizer.param_groups)
    kwargs.setdefault("compression", Carried)
    wrapped = hvd.DistributedOptimizer(optimizer, **kwargs)
    # Horovod makes it anew from the parameters alone, and so loses what was loaded, registered or defaulted.
    # `step` may be there because a scheduler has replaced it, on the optimizer without Horovod.
    vars(wrapped).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    # Horovod has just made this class for this optimizer, and calls super(self.__class__, self), so its
    # methods can be replaced but not inherited.
    made, plain = type(wrapped), type(optimizer)
    wrapped._sent = {}  # the gradients under way, by their parameters
    made.zero_grad = _zero_grad(plain)
    if kwargs.get("op") != hvd.Adasum:
        _let_backward_again(wrapped, wrapped.param_groups)
        made._allreduce_grad_async = _noting_what_is_sent(made._allreduce_grad_async)
        made.synchronize = _synchronize(made.synchronize, f"ignite_dist.{name}.used")
        made.step = _step(inspect.unwrap(made.step), f"ignite_dist.{name}.loss")
        made.add_param_group = _add_param_group(plain, name)
    return wrapped  # type: ignore[no-any-return]


def _names(name: str, groups: list[dict[str, Any]], first: int = 0) -> list[tuple[str, Tensor]]:
    return [
        (f"ignite_dist.{name}.{number}.{position}", parameter)
        for number, group in enumerate(groups, first)
        for position, parameter in enumerate(group["params"])
    ]


class Carried:
    """A compression that loses nothing and makes of any gradient one that Horovod takes.

    It takes neither bfloat16 nor complex numbers nor what is not contiguous, and rounds float16 after every
    rank. Halves are added in float32: unlike ``all_reduce``, which adds them in float64, for half the bytes.
    """

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, torch.dtype]:
        """The gradient as it is sent, and its dtype."""
        dtype, sent = gradient.dtype, gradient
        if dtype.is_complex:
            sent = torch.view_as_real(gradient.resolve_conj())
        elif dtype in (torch.bfloat16, torch.float16):
            sent = gradient.float()
        return sent.contiguous(), dtype

    @staticmethod
    def decompress(gradient: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The gradient in its own dtype; None is Horovod's word for a sparse one."""
        if dtype is None:
            return gradient
        return torch.view_as_complex(gradient) if dtype.is_complex else gradient.to(dtype)


def _zero_grad(plain: type[Optimizer]) -> Callable[..., None]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients, those that are being averaged when they have been."""
        if self._handles:  # of another loss that went through these parameters: Horovod would raise
            self.synchronize()
            self._synchronized = False
        plain.zero_grad(self, *args, **kwargs)

    return zero_grad


def _step(horovods: Callable[..., Any], name: str) -> Callable[..., Any]:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients and make a step; of a closure what it makes and returns, at each call."""
        if closure is None and take_mark(self):
            with self.skip_synchronize():
                result = horovods(self)
            self._synchronized = False
            return result
        if closure is None or not self._should_synchronize:
            return horovods(self, closure)

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            return _mean(loss, name, self.process_set)  # L-BFGS decides by it how often to call again

        # Horovod itself would average what there is before the closure makes the gradients.
        with self.skip_synchronize():
            result = horovods(self, averaged)
        self._synchronized = False
        return result

    # The optimizer's own step runs its hooks; with this mark torch does not make this one run them too.
    step.hooked = True  # type: ignore[attr-defined]
    return step


def _synchronize(horovods: Callable[..., None], name: str) -> Callable[..., None]:
    def synchronize(self: Any) -> None:
        """Average the gradients; what has none on any rank keeps None, where Horovod would make zeros."""
        import horovod.torch as hvd

        if not self.process_set.included() or self.process_set.size() == 1:
            return horovods(self)
        trained = [parameter for parameter in parameters_of(self) if parameter in self._requires_update]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        handle = hvd.allreduce_async_(used, op=hvd.Max, name=name, process_set=self.process_set)
        for parameter in trained:
            if parameter.grad is None:  # dropped while its average was under way
                _finish(self, parameter)
        horovods(self)
        self._sent.clear()  # it would keep the gradients
        hvd.synchronize(handle)
        for parameter, is_used in zip(trained, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    return synchronize


def _let_backward_again(wrapped: Any, groups: list[dict[str, Any]]) -> None:
    """Allow a second backward pass before the step, where Horovod raises: of two losses, say, or of a GAN.

    The second finds the average of the first under way in the gradient that it is to be added to. So it waits
    for it, and the average is taken once more of the sum: what all ranks have in common stays as it is. Each
    rank makes as many passes through a parameter as the others.
    """
    optimizer = weakref.ref(wrapped)

    def watch(parameter: Tensor) -> None:
        def finish_first(_: Tensor) -> None:
            own = optimizer()
            if own is not None:
                _finish(own, parameter)

        parameter.register_hook(finish_first)  # type: ignore[no-untyped-call]

    for group in groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                watch(parameter)


def _noting_what_is_sent(horovods: Callable[..., Any]) -> Callable[..., Any]:
    def allreduce_grad_async(self: Any, parameter: Tensor) -> Any:
        sent = horovods(self, parameter)
        assert parameter.grad is not None
        self._sent[parameter] = parameter.grad, parameter.grad._version
        return sent

    return allreduce_grad_async


def _finish(optimizer: Any, parameter: Any) -> None:
    """Wait for the average of a gradient, if it is under way, and put it there."""
    import horovod.torch as hvd

    handle, context = optimizer._handles.get(parameter, (None, None))
    if handle is None or parameter not in optimizer._sent:  # with groups= Horovod sends several as one
        return
    average = optimizer._compression.decompress(hvd.synchronize(handle), context)
    sent, version = optimizer._sent.pop(parameter)
    if parameter.grad is sent and sent._version == version:  # else it was dropped: model.zero_grad()
        parameter.grad.set_(average)
    del optimizer._handles[parameter]
    optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step


@contextmanager
def accumulating(optimizers: Sequence[Any]) -> Iterator[None]:
    """Keep the hooks of ``optimizers`` from sending what the block's backward passes compute.

    Horovod counts down passes to know when to send, and has to be told their number before the first. So the
    counts are put out of reach, and those that the block has found are put back.
    """
    for optimizer in optimizers:
        for parameter in list(optimizer._handles):
            _finish(optimizer, parameter)
    counts = [dict(optimizer._allreduce_delay) for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer._allreduce_delay.update(dict.fromkeys(optimizer._allreduce_delay, _NEVER))
    try:
        yield
    finally:
        for optimizer, known in zip(optimizers, counts, strict=True):
            optimizer._allreduce_delay.update(known)
            # What the hooks have noted without sending it; synchronize() sends what has no note.
            for parameter, (handle, _) in list(optimizer._handles.items()):
                if handle is None:
                    del optimizer._handles[parameter]


def _mean(loss: Any, name: str, process_set: Any) -> Any:
    """The mean of a loss, a number or a tensor of one, over the ranks of ``process_set``."""
    import horovod.torch as hvd

    if loss is None or not process_set.included() or process_set.size() == 1:
        return loss
    value = loss.detach() if isinstance(loss, Tensor) else loss
    total = torch.tensor([float(value)], dtype=torch.float64)
    mean = hvd.allreduce(total, op=hvd.Average, name=name, process_set=process_set)
    return torch.full_like(value, mean.item()) if isinstance(value, Tensor) else mean.item()


def _add_param_group(plain: type[Optimizer], name: str) -> Callable[..., None]:
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add parameters; Horovod itself would leave their gradients as they are on each rank."""
        plain.add_param_group(self, param_group)
        groups = self.param_groups
        for full_name, parameter in _names(name, groups[-1:], first=len(groups) - 1):
            self._parameter_names[parameter] = full_name
            self._allreduce_delay[parameter] = self.backward_passes_per_step
        _let_backward_again(self, groups[-1:])
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


def load_state(optimizer: Optimizer, state: bytes | memoryview, device: torch.device) -> None:
    """Give ``optimizer`` the state of another one that has the same parameters.

    Unlike ``load_state_dict`` it keeps the dicts that others hold (a scheduler, the plain optimizer), and
    every dtype.

    Args:
        optimizer: whose groups and state are written to.
        state: of :func:`state_as_bytes`.
        device: where what comes from another rank's accelerator goes.
    """

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    saved = torch.load(io.BytesIO(state), map_location=place, weights_only=False)
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})
    parameters = list(parameters_of(optimizer))
    optimizer.state.clear()
    for key, value in saved["state"].items():  # by the number of a parameter, or by a key of the user's own
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value
