"""``hvd.DistributedOptimizer``, for a current torch.

Horovod 0.28.1 is older than ``zero_grad(set_to_none=...)``; its optimizer averages in the very gradients that
others read and write meanwhile, and counts on every rank making the same passes through the same parameters.
So there is another one here, with the same attributes and methods, over Horovod's collectives.
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
from ignite_dist.comp_models.horovod.gradients import Gradients
from ignite_dist.comp_models.horovod.reduction import Carried, Reduction
from ignite_dist.comp_models.horovod.rounds import Exchange
from ignite_dist.gradients import parameters_of, take_mark

__all__ = [
    "Exchange",
    "accumulating",
    "averaging_in_block",
    "distribute",
    "load_state",
    "state_as_bytes",
    "synchronize",
]

_NEVER = 1 << 60  # backward passes until Horovod's own optimizer sends


def distribute(optimizer: Optimizer, name: str, exchange: Exchange, **kwargs: Any) -> Optimizer:
    """``optimizer`` with gradients that are averaged over all ranks when a backward pass has ended.

    It shares the parameter groups, the state, the defaults and the hooks of ``optimizer``.

    Args:
        optimizer: any; one that Horovod has wrapped already is returned as it is.
        name: the same on every rank, and of no other optimizer.
        exchange: of the context.
        kwargs: those of ``hvd.DistributedOptimizer``.

    Raises:
        ValueError: ``kwargs`` for an optimizer that Horovod has wrapped; or Adasum, and Horovod was built
            without MPI.
    """
    import horovod.torch as hvd

    if hasattr(optimizer, "skip_synchronize"):
        if kwargs:
            raise ValueError(
                f"The optimizer is Horovod's already, so {', '.join(kwargs)} would have no effect."
            )
        return optimizer
    if kwargs.get("op") == hvd.Adasum and not hvd.mpi_built():
        raise ValueError(
            "op=hvd.Adasum needs Horovod built with MPI, and this one was built without. Take hvd.Average or "
            "hvd.Sum, or build Horovod with HOROVOD_WITH_MPI=1."
        )
    if kwargs.get("op") == hvd.Adasum and hvd.size() > 1:  # its optimizer averages no gradients
        wrapped = hvd.DistributedOptimizer(optimizer, **kwargs)
        _share(optimizer, wrapped)
        return wrapped  # type: ignore[no-any-return]
    plain = type(optimizer)
    # As Horovod makes it: the class above the new one is the optimizer's own, and the module is Horovod's.
    # hvd.broadcast_optimizer_state() knows by these how to make a step without averaging.
    namespace = {**vars(_Distributed), "_plain": plain, "__doc__": plain.__doc__}
    made: Any = type(
        plain.__name__, (plain,), {**namespace, "__module__": hvd.DistributedOptimizer.__module__}
    )
    own = made.__new__(made)
    _share(optimizer, own)
    own._distribute(name, exchange, **kwargs)
    return own  # type: ignore[no-any-return]


def _share(optimizer: Optimizer, wrapped: Any) -> None:
    # `step` may be there because a scheduler has replaced it, on the optimizer without Horovod.
    vars(wrapped).update({key: value for key, value in vars(optimizer).items() if key != "step"})


class _Distributed(Optimizer):
    """What the class of an optimizer gets; ``_plain`` is the class that it had."""

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
        """How many backward passes add to a gradient before it is averaged."""
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
        """Average what has not been averaged yet. The step does the same, so this is for who may not wait.

        Raises:
            RuntimeError: a later optimizer averages some of the gradients over other ranks, or reduces them
                by another operation; or the process set was removed.
            MissingRanksError: another rank has ended.
        """
        self._gradients.check_heirs()
        self._gradients.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager: a step in the block takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with averaged gradients; of a closure what it makes and returns, at each call."""
        if self._should_synchronize:
            self._gradients.check_heirs()
        if closure is None:
            is_averaged = take_mark(self)
            if self._should_synchronize and not is_averaged:
                self.synchronize()
        elif self._should_synchronize:
            closure = self._averaging(closure)
        result = self._plain.step(self) if closure is None else self._plain.step(self, closure)
        self._gradients.end_step()
        return result

    # The optimizer's own step runs its hooks; with this mark torch does not make this one run them too.
    step.hooked = True  # type: ignore[attr-defined]

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            self._gradients.begin()
            loss = closure()
            self.synchronize()
            # L-BFGS decides by it how often to call again.
            return _mean(loss, f"ignite_dist.{self._name}.loss", self._gradients)

        return averaged

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients, or set them to zero."""
        self._plain.zero_grad(self, *args, **kwargs)
        self._gradients.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are averaged too."""
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
    """Those of the optimizer's parameters, in an order that depends on the names alone."""
    pairs = list(named)
    if any(not isinstance(one, tuple) for one in pairs):
        raise ValueError(
            "named_parameters= takes pairs (name, parameter), as model.named_parameters() gives."
        )
    twice = [one for one, count in Counter(its_name for its_name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters= has the same name twice: {', '.join(twice)}.")
    own = {id(parameter) for group in groups for parameter in group["params"]}
    if missing := len(own - {id(parameter) for _, parameter in pairs}):
        raise ValueError(f"named_parameters= has no names for {missing} of the optimizer's parameters.")
    found = {id(parameter): (f"ignite_dist.{name}.{its_name}", parameter) for its_name, parameter in pairs}
    return sorted((one for key, one in found.items() if key in own), key=lambda one: one[0])


def _checked_groups(groups: Any) -> Any:
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError(f"groups= is a positive int, or a list of lists of parameters; got {groups!r}.")
    members = [parameter for group in groups for parameter in group]
    if any(not isinstance(one, Tensor) for one in members):
        raise ValueError("groups= has something in it that is no tensor.")
    if len({id(one) for one in members}) < len(members):
        raise ValueError("groups= has a parameter twice.")
    return groups


@contextmanager
def accumulating(optimizers: Sequence[Any]) -> Iterator[None]:
    """Leave the gradients of the block's backward passes as each rank's own.

    Raises:
        ValueError: one of ``optimizers`` is neither :func:`distribute`'s nor Horovod's.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if hasattr(optimizer, "_gradients"):
                stack.enter_context(_is_local(optimizer._gradients))
            elif _horovod.counts_passes(optimizer):
                stack.enter_context(_out_of_reach(optimizer))
            else:
                raise ValueError(
                    f"This {type(optimizer).__name__} averages no gradients: take what auto_optim returned."
                )
        yield


@contextmanager
def averaging_in_block(optimizers: Sequence[Any]) -> Iterator[None]:
    """Average the gradients at the end of the block, unless a backward pass in it does.

    A rank may make no backward pass. What it reads after the block is the average all the same. Horovod's own
    optimizers are left alone: they average in the step, and would do it there again.
    """
    own = [optimizer._gradients for optimizer in optimizers if hasattr(optimizer, "_gradients")]
    if not torch.is_grad_enabled():
        own = []
    for gradients in own:
        gradients.begin()
    yield
    for gradients in own:
        gradients.finish()


def synchronize(optimizer: Any) -> None:
    """Average what has not been averaged yet, before another object makes the step."""
    if hasattr(optimizer, "_gradients"):
        optimizer._gradients.finish()
    else:
        optimizer.synchronize()


@contextmanager
def _is_local(gradients: Gradients) -> Iterator[None]:
    before, gradients.is_local = gradients.is_local, True
    try:
        yield
    finally:
        gradients.is_local = before


@contextmanager
def _out_of_reach(optimizer: Any) -> Iterator[None]:
    """Have Horovod's own optimizer send nothing: it sends when it has counted enough passes."""
    known = dict(_horovod.passes_until_sent(optimizer))
    _horovod.passes_until_sent(optimizer).update(dict.fromkeys(known, _NEVER))
    try:
        yield
    finally:
        _horovod.passes_until_sent(optimizer).update(known)
        # What its hooks have noted without sending it; its synchronize() sends what has no note.
        noted = _horovod.noted_calls(optimizer)
        for parameter, (handle, _) in list(noted.items()):
            if handle is None:
                del noted[parameter]


def _mean(loss: Any, name: str, gradients: Gradients) -> Any:
    """The mean of a loss, a number or a tensor of one, over the ranks that average ``gradients``."""
    is_loss = isinstance(loss, Number) or (isinstance(loss, Tensor) and loss.numel() == 1)
    if not is_loss or not gradients.rounds.is_active():
        return loss
    value: Any = loss.detach() if isinstance(loss, Tensor) else loss
    mean = gradients.rounds.mean(float(value), name)
    return torch.full_like(value, mean) if isinstance(value, Tensor) else mean


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
