"""The interface by which a backend prepares models, optimizers and data loaders."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary, ref

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_dist.comp_models.transport import Group
from ignite_dist.comp_models.work import communicates
from ignite_dist.internals import _torch, tracing
from ignite_dist.internals.arguments import check_keywords
from ignite_dist.internals.call_sites import warn_user

if TYPE_CHECKING:
    from ignite_dist.comp_models.base import ComputationModel

NO_OPTIMIZER = (
    "No optimizer from auto_optim has parameters of this model. With this backend the optimizer averages the "
    "gradients: call auto_optim first."
)


def check_fsdp_keywords(kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if FSDP2 does not know a keyword."""
    from torch.distributed.fsdp import fully_shard

    check_keywords("auto_model", kwargs, set(inspect.signature(fully_shard).parameters) - {"module"})


def check_no_scheduler(optimizer: Optimizer) -> None:
    """Raise ValueError if a scheduler was made for ``optimizer``, which ``zero=True`` replaces."""
    # ReduceLROnPlateau leaves no mark.
    schedulers = (one for one in gc.get_objects() if issubclass(type(one), LRScheduler))
    if _torch.has_had_scheduler(optimizer) or any(
        getattr(one, "optimizer", None) is optimizer for one in schedulers
    ):
        raise ValueError(
            f"A scheduler was made for this {type(optimizer).__name__} before auto_optim(zero=True), which "
            "makes another optimizer: the scheduler would change nothing. Make the scheduler after "
            "auto_optim, of its result."
        )


class Training:
    """Prepares models, optimizers and data loaders. By default models and optimizers stay unchanged.

    In methods with the arguments ``model`` and ``optimizers``, ``model`` is the result of :meth:`wrap_model`
    or a module that contains the result, and ``optimizers`` are the results of :meth:`wrap_optimizer` that
    have the model's parameters. Every rank calls each method at the same point.
    """

    averages_gradients: ClassVar[bool] = False
    """True if the wrapped model or optimizer averages gradients. If False, ``auto_optim`` averages them."""

    averages_in_backward: ClassVar[bool] = False
    """True if the model from :meth:`wrap_model` averages gradients in the backward pass."""

    shares_optimizers: ClassVar[bool] = False
    """True if :meth:`wrap_optimizer` gives all ranks the state and the settings of rank 0's optimizer."""

    computes_lazily: bool = False
    """True if tensors are computed only when Python reads them. A training step should then not read any."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tracing.untrace_class(cls)

    def __init__(self, context: ComputationModel) -> None:
        self._context = ref(context)
        self.optimizers: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
        """The optimizers that ``auto_optim`` has returned, by ``id()``."""

    @property
    def context(self) -> ComputationModel:
        """The context of this object."""
        found = self._context()
        assert found is not None
        return found

    def seed(self, seed: int) -> None:
        """Seed torch on the CPU and on this rank's devices."""
        torch.manual_seed(seed)

    def random_state(self) -> dict[str, Any] | None:
        """The random state of this rank's device as plain values; None for the CPU."""
        device = self.context.device()
        if device.type == "cpu":
            return None
        return {"type": device.type, "state": torch.get_device_module(device).get_rng_state(device)}

    def set_random_state(self, saved: dict[str, Any] | None) -> None:
        """Restore a result of :meth:`random_state`. No effect if it is of another type of device."""
        device = self.context.device()
        if saved is not None and saved["type"] == device.type:
            torch.get_device_module(device).set_rng_state(saved["state"], device)

    @communicates
    def wrap_model(self, model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
        """Prepare ``model``, which is already on the context's device, and return it or a wrapper.

        Raises:
            TypeError: unknown keywords.
        """
        return model

    @communicates
    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        """Prepare ``optimizer`` and return it or a wrapper.

        Raises:
            TypeError: unknown keywords.
        """
        return optimizer

    def device_loader(self) -> type[Any] | None:
        """The class of a loader around torch's that copies batches to the device. None: on the host.

        It is called with a ``DataLoader`` and the device. Its method ``batches_of(loader)`` makes the batches
        of one pass over ``loader``: an iterator with a length.
        """
        return None

    def check_sharding(self) -> None:
        """Raise if the backend has no :meth:`shard_model`, before any communication.

        Raises:
            ValueError: the backend cannot shard models.
        """
        raise ValueError(
            "strategy='fsdp' needs torch.distributed, but this backend is "
            f"{self.context.backend()!r}: omit strategy."
        )

    @communicates
    def shard_model(self, model: Module, wrap: Sequence[type[Module]], **kwargs: Any) -> Module:
        """Shard the parameters of ``model``, which are equal on all ranks, over the ranks.

        Raises:
            TypeError: unknown keywords.
        """
        if kwargs:  # of the only rank
            check_fsdp_keywords(kwargs)
            warn_user(
                f"{', '.join(kwargs)} has no effect, because FSDP2 needs torch.distributed: start the "
                "script with idist.Parallel or a launcher, or call idist.initialize first."
            )
        return model

    @communicates
    def replicate_model(
        self, model: Module, group: Group, average: Callable[[list[Parameter], Group], None]
    ) -> None:
        """Average the gradients of ``model``, which has ``DTensor`` parameters, over ``group``.

        Called only where :meth:`Transport.make_mesh` makes meshes. ``average`` averages the gradients of
        parameters over the group. Call it once after each backward pass, and in :meth:`average_in_block`.
        """
        raise NotImplementedError

    def average_further_passes(self, model: Module, average: Callable[[list[Parameter]], None]) -> None:
        """Call ``average`` after each backward pass of ``model`` that its wrapper leaves alone.

        ``average`` averages the gradients of parameters.
        """

    @communicates
    def prepare_pass(self, model: Module) -> None:
        """Exchange what the next forward pass would, so that a rank may skip the pass."""

    def has_seen_pass(self, model: Module) -> bool:
        """False if the wrapper of ``model`` knows that no backward pass has reached its parameters."""
        return True

    @communicates
    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer like ``optimizer``, with its state sharded over the ranks.

        Raises:
            ValueError: the backend cannot shard optimizers, or ``optimizer`` has a scheduler.
        """
        raise ValueError(
            f"zero=True needs torch.distributed, but this backend is {self.context.backend()!r}: omit zero."
        )

    @communicates
    def join(
        self, model: Module, optimizer: Optimizer | None, **kwargs: Any
    ) -> AbstractContextManager[list[int]]:
        """Context manager: ranks may make different numbers of steps in the block.

        Yields a list. After the block the list contains the rank from which the other ranks must copy the
        parameters. The list stays empty if all ranks already have equal parameters.

        Raises:
            ValueError: the backend does not support ``uneven_inputs()``.
        """
        raise ValueError(
            f"Backend {self.context.backend()!r} does not support uneven_inputs(): every rank must take part "
            "in every step. Give all ranks the same number of batches, or stop all ranks together: "
            "any_true(...)."
        )

    def accumulate(self, model: Module, optimizers: Sequence[Optimizer]) -> AbstractContextManager[None]:
        """Context manager: backward passes in the block do not average gradients; later passes do."""
        return nullcontext()

    @communicates
    def average_in_block(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        """Context manager: if backward passes average gradients, all gradients are averaged after the block.

        At the end of the block this rank averages the gradients that are left: all gradients if the block had
        no backward pass, else the gradients of the parameters that the backward passes have not used.
        """
        return nullcontext()

    def gradient_group(self, model: Module, optimizers: Sequence[Optimizer]) -> Group:
        """The ranks over which the gradients of ``model`` are averaged.

        Raises:
            ValueError: parts of ``model`` are averaged over different groups of ranks.
        """
        return self.context.groups.world

    def check_forced(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        """Check that averaging over all ranks, outside of backward pass and step, gives correct gradients.

        Raises:
            ValueError: the gradients would be wrong; the message gives the reason.
        """

    def mark_averaged(self, model: Module) -> None:
        """Record that the gradients of ``model`` have been averaged outside of its backward passes."""

    @communicates
    def reduce_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients that a step of ``optimizer`` would average, without the step."""


tracing.untrace_class(Training)
