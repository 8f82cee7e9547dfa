"""A replacement for ``hvd.DistributedOptimizer`` that works with current versions of torch.

Horovod 0.28.1 predates ``zero_grad(set_to_none=...)``. Horovod's optimizer averages gradients in place while
other code may use the gradients, and requires the same passes through the same parameters on all ranks.
The optimizers in this module have the attributes and methods of Horovod's optimizer.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Number
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_dist.comp_models.horovod import _horovod
from ignite_dist.comp_models.horovod.averaging import Gradients
from ignite_dist.comp_models.horovod.reduction import Carried, Reduction
from ignite_dist.comp_models.horovod.rounds import Exchange
from ignite_dist.values import views
from ignite_dist.values.gradients import parameters_of, take_mark
from ignite_dist.values.serialization import Payload

_NEVER = 1 << 60  # more backward passes than any training makes


def distribute(optimizer: Optimizer, name: str, exchange: Exchange, **kwargs: Any) -> Optimizer:
    """Wrap ``optimizer``: each backward pass averages the gradients over the ranks.

    The result shares the parameter groups, the state, the defaults and the hooks of ``optimizer``.

    Args:
        optimizer: any optimizer. An optimizer that Horovod has wrapped is returned unchanged.
        name: equal on every rank, and different from other optimizers' names.
        exchange: the context's exchange.
        kwargs: the arguments of ``hvd.DistributedOptimizer``.

    Raises:
        ValueError: ``kwargs`` were passed with an optimizer that Horovod has wrapped, or Horovod was built
            without MPI and ``op`` is Adasum.
    """
    import horovod.torch as hvd

    if hasattr(optimizer, "skip_synchronize"):
        if kwargs:
            raise ValueError(
                f"Horovod has already wrapped this optimizer, so {', '.join(kwargs)} would have no effect."
            )
        return optimizer
    if kwargs.get("op") == hvd.Adasum and not hvd.mpi_built():
        raise ValueError(
            "op=hvd.Adasum needs Horovod built with MPI, but Horovod was built without MPI. Use hvd.Average "
            "or hvd.Sum, or build Horovod with HOROVOD_WITH_MPI=1."
        )
    if kwargs.get("op") == hvd.Adasum and hvd.size() > 1:  # Adasum reduces updates, not gradients
        wrapped = hvd.DistributedOptimizer(optimizer, **kwargs)
        _share(optimizer, wrapped)
        return wrapped  # type: ignore[no-any-return]
    plain = type(optimizer)
    # As in Horovod: hvd.broadcast_optimizer_state() depends on the base class and on __module__.
    namespace = {**vars(_Distributed), "_plain": plain, "__doc__": plain.__doc__}
    made: Any = type(
        plain.__name__, (plain,), {**namespace, "__module__": hvd.DistributedOptimizer.__module__}
    )
    distributed = made.__new__(made)
    _share(optimizer, distributed)
    distributed._distribute(name, exchange, **kwargs)
    return distributed  # type: ignore[no-any-return]


def _share(optimizer: Optimizer, wrapped: Any) -> None:
    # Skip `step`: a scheduler may have replaced the plain optimizer's `step`.
    vars(wrapped).update({key: value for key, value in vars(optimizer).items() if key != "step"})


class _Distributed(Optimizer):
    """Methods that :func:`distribute` adds to an optimizer's class ``_plain``."""

    _plain: ClassVar[Any]

    def _distribute(
        self,
        name: str,
        exchange: Exchange,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Any = None,
        backward_passes_per_step: int = 1,
        op: Any = None,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = None,
    ) -> None:
        import horovod.torch as hvd

        groups = _checked_groups(groups if groups is not None else num_groups or None)
        if named_parameters is None:
            named = _names(name, self.param_groups)
        else:
            named = _checked_names(name, named_parameters, self.param_groups)
        self.op = hvd.Average if op is None else op
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self._should_synchronize = True
        self._name = name
        reduction = Reduction(
            self.process_set,
            Carried if compression is None else compression,
            self.op,
            gradient_predivide_factor,
            sparse_as_dense,
        )
        self._gradients = Gradients(exchange, name, reduction, groups)
        self.set_backward_passes_per_step(backward_passes_per_step)
        self._gradients.add(named)

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes that add to a gradient before the gradient is averaged."""
        return self._gradients.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step is a positive int, got {passes!r}.")
        self._gradients.passes = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set :attr:`backward_passes_per_step`."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Average the gradients that have not been averaged yet. :meth:`step` does the same.

        Raises:
            RuntimeError: a later optimizer reduces some of the gradients over other ranks or by another
                operation, or the process set was removed.
            MissingRanksError: another rank has ended.
        """
        self._gradients.check_new_owners()
        self._gradients.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager: a step in the block does not average the gradients."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with averaged gradients. Average gradients and loss after each call of ``closure``."""
        if self._should_synchronize:
            self._gradients.check_new_owners()
        if closure is None:
            is_averaged = take_mark(self)
            if self._should_synchronize and not is_averaged:
                self.synchronize()
        elif self._should_synchronize:
            closure = self._averaging(closure)
        result = self._plain.step(self) if closure is None else self._plain.step(self, closure)
        self._gradients.end_step()
        return result

    # The plain optimizer's step runs the step hooks. With this mark, torch does not run the hooks here too.
    step.hooked = True  # type: ignore[attr-defined]

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            self._gradients.begin()
            loss = closure()
            self.synchronize()
            # L-BFGS uses the loss to decide how often it calls the closure.
            return _mean(loss, f"ignite_dist.{self._name}.loss", self._gradients)

        return averaged

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Set the gradients to None or to zero."""
        self._plain.zero_grad(self, *args, **kwargs)
        self._gradients.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Their gradients are averaged too."""
        self._plain.add_param_group(self, param_group)
        groups = self.param_groups
        self._gradients.add(_names(self._name, groups[-1:], first=len(groups) - 1))


def _names(name: str, groups: list[dict[str, Any]], first: int = 0) -> list[tuple[str, Tensor]]:
    return [
        (f"ignite_dist.{name}.{number}.{position}", parameter)
        for number, group in enumerate(groups, first)
        for position, parameter in enumerate(group["params"])
    ]


def _checked_names(
    name: str, named: Iterable[tuple[str, Tensor]], groups: list[dict[str, Any]]
) -> list[tuple[str, Tensor]]:
    """Check ``named`` and return the optimizer's parameters, sorted by name."""
    pairs = list(named)
    if any(not isinstance(one, tuple) for one in pairs):
        raise ValueError(
            "named_parameters= takes pairs (name, parameter), for example model.named_parameters()."
        )
    repeated = [one for one, count in Counter(given for given, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"named_parameters= has the same name twice: {', '.join(repeated)}.")
    ids = {id(parameter) for group in groups for parameter in group["params"]}
    if missing := len(ids - {id(parameter) for _, parameter in pairs}):
        raise ValueError(f"named_parameters= has no names for {missing} of the optimizer's parameters.")
    found = {id(parameter): (f"ignite_dist.{name}.{given}", parameter) for given, parameter in pairs}
    return sorted((one for key, one in found.items() if key in ids), key=lambda one: one[0])


def _checked_groups(groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError(f"groups= is a positive int, or a list of lists of parameters; got {groups!r}.")
    members = [parameter for group in groups for parameter in group]
    if any(not isinstance(one, Tensor) for one in members):
        raise ValueError("groups= contains an element that is not a tensor.")
    if len({id(one) for one in members}) < len(members):
        raise ValueError("groups= contains a parameter twice.")
    return groups


@contextmanager
def accumulating(optimizers: Sequence[Any]) -> Iterator[None]:
    """Context manager: backward passes in the block do not average gradients.

    Raises:
        ValueError: one of ``optimizers`` was wrapped neither by :func:`distribute` nor by Horovod.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if hasattr(optimizer, "_gradients"):
                stack.enter_context(_without_averaging(optimizer._gradients))
            elif _horovod.counts_passes(optimizer):
                stack.enter_context(_without_sending(optimizer))
            else:
                raise ValueError(
                    f"{type(optimizer).__name__} does not average gradients: use the result of auto_optim."
                )
        yield


@contextmanager
def averaging_in_block(optimizers: Sequence[Any]) -> Iterator[None]:
    """Average the gradients at the end of the block, unless a backward pass in the block averages them.

    A rank that makes no backward pass also gets the averages. Horovod's own optimizers are skipped,
    because they average in the step.
    """
    averaged = [optimizer._gradients for optimizer in optimizers if hasattr(optimizer, "_gradients")]
    if not torch.is_grad_enabled():
        averaged = []
    for gradients in averaged:
        gradients.begin()
    yield
    for gradients in averaged:
        gradients.finish()


def synchronize(optimizer: Any) -> None:
    """Average the gradients that have not been averaged yet, before another object makes the step."""
    if hasattr(optimizer, "_gradients"):
        optimizer._gradients.finish()
    else:
        optimizer.synchronize()


@contextmanager
def _without_averaging(gradients: Gradients) -> Iterator[None]:
    was_local, gradients.is_local = gradients.is_local, True
    try:
        yield
    finally:
        gradients.is_local = was_local


@contextmanager
def _without_sending(optimizer: Any) -> Iterator[None]:
    """Context manager: Horovod's own optimizer sends no gradients in the block."""
    known = dict(_horovod.passes_until_sent(optimizer))
    _horovod.passes_until_sent(optimizer).update(dict.fromkeys(known, _NEVER))
    try:
        yield
    finally:
        _horovod.passes_until_sent(optimizer).update(known)
        # Remove the entries of unsent gradients. synchronize() also sends gradients without an entry.
        recorded = _horovod.recorded_calls(optimizer)
        for parameter, (handle, _) in list(recorded.items()):
            if handle is None:
                del recorded[parameter]


def _mean(loss: Any, name: str, gradients: Gradients) -> Any:
    """Mean of ``loss``, a number or one-element tensor, over the ranks that average ``gradients``."""
    is_loss = isinstance(loss, Number) or (isinstance(loss, Tensor) and loss.numel() == 1)
    if not is_loss or not gradients.rounds.is_active():
        return loss
    value: Any = loss.detach() if isinstance(loss, Tensor) else loss
    mean = gradients.rounds.mean(float(value), name)
    return torch.full_like(value, mean) if isinstance(value, Tensor) else mean


# --- the state; hvd.broadcast_optimizer_state() would make a step to create the state ------------------


def state_as_bytes(optimizer: Optimizer) -> bytes:
    """Serialize the optimizer's state for :func:`load_state`."""
    buffer = io.BytesIO()
    views.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def load_state(optimizer: Optimizer, state: Payload, device: torch.device) -> None:
    """Replace the state of ``optimizer`` with the state of an optimizer of the same model.

    Unlike ``load_state_dict``, this function keeps all dtypes. Group and state dicts are changed in place.

    Args:
        optimizer: an optimizer with the same parameter groups as the saved optimizer.
        state: the result of :func:`state_as_bytes`.
        device: the device for tensors that were on another rank's accelerator.
    """

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    saved = torch.load(io.BytesIO(state), map_location=place, weights_only=False)
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})
    parameters = list(parameters_of(optimizer))
    optimizer.state.clear()
    for key, value in saved["state"].items():  # an int key is a parameter's position
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value
