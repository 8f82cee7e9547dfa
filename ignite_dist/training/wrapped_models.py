"""The module inside of what ``auto_model`` has put around it, and its methods as forward passes."""

from __future__ import annotations

from typing import Any

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from ignite_dist import _torch

__all__ = ["mark_forward_method", "unwrap_model"]


def unwrap_model(model: Module) -> Module:
    """The module inside of what :func:`auto_model` and ``torch.compile`` have put around it.

    ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` are taken off, nested in any order, as
    far as they are on the outside. A model that is none of them comes back as it is, one with FSDP2 too: it
    is changed in place and has nothing around it. To save it, to evaluate it without collectives, or to call
    a method of its own. Never communicates, so one rank may call it alone. After training the module's
    buffers are this rank's, until a pass over a loader of ``auto_dataloader(exact=...)`` begins.
    """
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif (inside := _torch.inside_of_compiled(model)) is not None:
            model = inside
        else:
            return model


def mark_forward_method(model: Module, name: str) -> None:
    """Make ``model.name(...)`` call that method of the module inside as a forward pass of the wrapper.

    Called on the module inside, a method of its own bypasses ``DistributedDataParallel``, and its gradients
    are not averaged. Where :func:`auto_model` wraps nothing this changes nothing.

    Args:
        model: what :func:`auto_model` returned.
        name: of a method of the module inside, which computes a loss for example.

    Raises:
        AttributeError: the module has no such method.
        ValueError: ``name`` is "forward"; or ``torch.compile`` is around the wrapper or inside of it, which
            keeps what ``forward`` was; or the wrapper is ``DataParallel``.

    Example::

        idist.mark_forward_method(model, "training_step")
        model.training_step(batch).backward()
    """
    inner = unwrap_model(model)
    method = getattr(inner, name)
    if name == "forward":
        raise ValueError("forward is what calling the model runs already.")
    if inner is model:
        return
    if not isinstance(model, DistributedDataParallel) or model.module is not inner:
        raise ValueError(
            f"{name} can go through the forward pass of a DistributedDataParallel around the module itself, "
            "not of torch.compile, which keeps what forward was, nor of DataParallel."
        )

    def through_forward(*args: Any, **kwargs: Any) -> Any:
        own = vars(inner).get("forward")  # somebody else may have replaced it

        def restore() -> None:
            vars(inner).pop("forward", None)
            if own is not None:
                inner.forward = own

        def instead(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may call it
            return method(*args, **kwargs)

        inner.forward = instead
        try:
            return model(*args, **kwargs)
        finally:
            restore()

    setattr(model, name, through_forward)
