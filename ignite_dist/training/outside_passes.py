"""Refuse backward passes that run after the block of :func:`accumulate_gradients` with their forward pass.

Such a pass adds gradients without their weight. Hooks at the outputs of forward passes in a block notice it,
but not in compiled functions, nor in a part of the model that is recomputed with ``use_reentrant=True``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.internals import _torch
from ignite_dist.internals.tracing import traced
from ignite_dist.training.gradient_sync import fsdp_modules
from ignite_dist.training.wrapped_models import module_inside
from ignite_dist.values.gradients import accumulation_node, nodes_of
from ignite_dist.values.pytree import flatten

_OUTSIDE = (
    "This backward pass runs outside of the `with sync:` block of its forward pass, where its gradients are "
    "neither weighted nor averaged with those of the other microbatches. Make both in one block: "
    "with sync: criterion(model(x), y).backward()"
)


class ForwardPasses:
    """The forward passes of ``model`` in the blocks of one loop.

    A backward pass through one of them raises while no block is open, before it adds to a gradient. Passes in
    a later block, and ``torch.autograd.grad``, which adds to no gradient, stay allowed (with FSDP2, whose
    passes must not fail in the middle, ``torch.autograd.grad`` is refused too).
    """

    def __init__(self, model: Module) -> None:
        self._model = weakref.ref(model)  # hooks of autograd's nodes, which nobody collects, hold this object
        self._is_open = False
        self._is_sharded = bool(fsdp_modules(model))
        self._refused = -1  # the number of a backward pass

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager: note the forward passes in the block."""
        model = self._model()
        assert model is not None  # the caller has it
        with ExitStack() as stack:
            for module in _called_by_scripts(model):
                # Before the hook of FSDP2, whose preparations for a backward pass come first otherwise.
                handle = module.register_forward_hook(_note_forward, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
                stack.callback(_set_current, module, _current.get(module))
                _current[module] = self
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False

    def note(self, inputs: Any, output: Any) -> None:
        """Note a forward pass."""
        outputs = flatten(output, is_local=True)[0]
        if not nodes_of(outputs):
            return
        given = nodes_of(flatten(inputs, is_local=True)[0])  # a module may return what it got
        for one in outputs:
            if isinstance(one, Tensor) and one.grad_fn is not None and one.grad_fn not in given:
                register = one.register_hook if self._is_sharded else one.grad_fn.register_prehook
                register(self._on_backward)

    def _on_backward(self, _: Any) -> None:
        if self._is_open:
            return
        number, model = _torch.number_of_backward_pass(), self._model()
        if number == self._refused or model is None:
            return
        if self._is_sharded:
            for module in fsdp_modules(model):
                module.reshard()  # the forward pass has left whole parameters, which zero_grad() would take
            raise RuntimeError(_OUTSIDE)
        self._refused = number
        handles: list[Any] = []

        def remove() -> None:
            for handle in handles:
                handle.remove()

        def refuse(_: Any) -> None:
            if _torch.number_of_backward_pass() == number:  # an earlier pass has failed otherwise
                remove()
                raise RuntimeError(_OUTSIDE)

        for parameter in model.parameters():
            if parameter.requires_grad:
                handles.append(accumulation_node(parameter).register_prehook(refuse))
        _torch.run_after_backward(remove)


_current: weakref.WeakKeyDictionary[Module, ForwardPasses] = weakref.WeakKeyDictionary()
"""What notes the forward passes of a module, in a block."""


def _set_current(module: Module, passes: ForwardPasses | None) -> None:
    if passes is None:
        _current.pop(module, None)
    else:
        _current[module] = passes


@traced
def _note_forward(module: Module, args: Any, kwargs: Any, output: Any) -> None:
    """The forward hook: one function for all blocks, because compiled functions are compiled with it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    passes = _current.get(module)  # a copy of a module has none
    if passes is not None:
        passes.note((args, kwargs), output)


def _called_by_scripts(model: Module) -> list[Module]:
    """``model``, what is inside of its wrappers, the modules directly inside, and each DDP."""
    found = [model]
    while not _is_compiled(found[-1]) and (inside := module_inside(found[-1])) is not None:
        found.append(inside)
    if not _is_compiled(found[-1]):
        found += found[-1].children()
        found += [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    return [one for one in dict.fromkeys(found) if not isinstance(one, torch.jit.ScriptModule)]


def _is_compiled(module: Module) -> bool:
    return _torch.inside_of_compiled(module) is not None
