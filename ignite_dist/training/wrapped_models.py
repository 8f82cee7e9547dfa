"""Unwrap the models of ``auto_model``, and call methods of the unwrapped module as forward passes."""

from __future__ import annotations

from typing import Any

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.internals import _torch


def unwrap_model(model: Module) -> Module:
    """The module inside the wrappers of :func:`auto_model` and ``torch.compile``.

    Outer ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` wrappers are removed, nested in
    any order. A model without a wrapper is returned unchanged. FSDP2 adds no wrapper: it changes the model in
    place. Use the unwrapped module to save it, to evaluate it without collectives, or to call its own
    methods. This function never communicates, so a single rank may call it. After training the buffers are
    those of this rank, until a pass over a loader of ``auto_dataloader(exact=...)`` begins.
    """
    while (inside := module_inside(model)) is not None:
        model = inside
    return model


def module_inside(model: Module) -> Module | None:
    """The module directly inside a wrapper; None if ``model`` is no wrapper."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        inside: Module = model.module
        return inside
    return _torch.inside_of_compiled(model)


def mark_forward_method(model: Module, name: str) -> None:
    """Make a call of ``model``'s method ``name`` a forward pass of the wrapper around the module.

    A method that is called on the unwrapped module bypasses ``DistributedDataParallel``, so its gradients are
    not averaged. Where :func:`auto_model` adds no wrapper, this function changes nothing.

    Args:
        model: the result of :func:`auto_model`.
        name: name of a method of the unwrapped module, for example one that computes a loss.

    Raises:
        AttributeError: the module has no such method.
        ValueError: ``name`` is "forward"; or the wrapper is ``DataParallel``; or ``torch.compile`` is around
            or inside the wrapper and would keep the old ``forward``.

    Example::

        idist.mark_forward_method(model, "training_step")
        model.training_step(batch).backward()
    """
    inner = unwrap_model(model)
    method = getattr(inner, name)
    if name == "forward":
        raise ValueError("name must not be 'forward': calling the model already runs forward.")
    if inner is model:
        return
    if not isinstance(model, DistributedDataParallel) or model.module is not inner:
        raise ValueError(
            f"{name} needs a DistributedDataParallel directly around the module. A model compiled by "
            "torch.compile would still run its old forward, and DataParallel is not supported."
        )

    def call_as_forward(*args: Any, **kwargs: Any) -> Any:
        replaced = vars(inner).get("forward")  # other code may have replaced forward

        def restore() -> None:
            vars(inner).pop("forward", None)
            if replaced is not None:
                inner.forward = replaced

        def temporary_forward(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may call forward
            return method(*args, **kwargs)

        inner.forward = temporary_forward
        try:
            return model(*args, **kwargs)
        finally:
            restore()

    setattr(model, name, call_as_forward)
