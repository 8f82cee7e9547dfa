"""Completes DDP's gradient reduction on ranks whose backward pass has not reached all parameters.

``DistributedDataParallel`` reduces a bucket of gradients when the backward pass has reached all parameters of
the bucket. A rank that misses a parameter never reduces that bucket, and the other ranks wait. If all ranks
miss parameters, no rank averages any gradient. So such a rank makes a backward pass of zeros through the
missing parameters. DDP then reduces the gradients that these parameters have accumulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.comp_models.native import further_passes
from ignite_dist.values.gradients import accumulation_node, add_gradients, empty_gradient, record_arrival

_REDUCTION = "_ignite_dist_reduction"  # attribute of a DistributedDataParallel: its _Reduction


@contextmanager
def complete_in_block(model: Module) -> Iterator[None]:
    """After the block each ``DistributedDataParallel`` in ``model`` has reduced its gradients.

    If ``model`` contains several of them, which may be trained in turn, this function skips each module that
    has no gradients and was not called in the block.

    Raises:
        RuntimeError: DDP waits for the gradient of a parameter that was frozen after the model was wrapped.
            Or this rank cannot know which of several wrapped models the other ranks have used.
    """
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    with ExitStack() as stack:
        reductions = {module: stack.enter_context(_record_arrivals(module)) for module in wrapped}
        yield
    if not torch.is_grad_enabled():  # an evaluation
        return
    if len(reductions) > 1:
        reductions = _used_reductions(reductions)
    for module, reduction in reductions.items():
        reduction.complete(module)


def _used_reductions(
    reductions: dict[DistributedDataParallel, _Reduction],
) -> dict[DistributedDataParallel, _Reduction]:
    used = {
        module: reduction
        for module, reduction in reductions.items()
        if reduction.was_prepared or reduction.has_gradients()
    }
    if not used:
        raise RuntimeError(
            f"The model contains {len(reductions)} DistributedDataParallel modules. This rank has used none "
            "of them in this step, so it does not know which modules the other ranks have used. Call "
            "grad_sync or accumulate_gradients with only the module that is trained."
        )
    return used


class _Reduction:
    """The parameters of one ``DistributedDataParallel`` that backward passes have reached in the block.

    Attributes:
        was_prepared: True if the module was called, so DDP expects a backward pass.
        arrived: the indices of the parameters that a backward pass has reached since that call.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        ignored = module.parameters_to_ignore
        trained = {
            name: parameter
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        self.names = list(trained)
        self.parameters = list(trained.values())
        self.sparse = _sparse_parameters(module)
        self.was_prepared = False
        self.arrived: set[int] = set()
        self.last_arrived: set[int] = set()  # the indices that the user's last backward pass reached
        # DDP references the same autograd nodes. Making the hooks takes 10 us per parameter, so do it once.
        self.nodes = [accumulation_node(parameter) for parameter in self.parameters]
        for number, node in enumerate(self.nodes):
            record_arrival(node, number, self.arrived)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module has other nodes and makes its own _Reduction

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def note_call(self, module: DistributedDataParallel, *_: Any) -> None:
        """Forward hook: DDP now expects a backward pass, unless the module is in ``no_sync()``."""
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self.was_prepared = True
            self.arrived.clear()

    def complete(self, module: DistributedDataParallel) -> None:
        """Complete the reduction on this rank."""
        if not self.parameters or not module.require_backward_grad_sync:  # within no_sync()
            return
        # For a call before the block: require_forward_param_sync is True if DDP expects a backward pass.
        is_prepared = self.was_prepared or module.require_forward_param_sync
        if not (is_prepared and self.arrived):
            _run_zero_pass(module, self)
        elif module.find_unused_parameters or module.static_graph:
            self.last_arrived = set(self.arrived)  # DDP's reducer finds unused parameters itself
        elif len(self.arrived) < len(self.parameters):
            self._add_missing()

    def _add_missing(self) -> None:
        missing = [number for number in range(len(self.parameters)) if number not in self.arrived]
        frozen = [self.names[number] for number in missing if not self.parameters[number].requires_grad]
        if frozen:
            raise RuntimeError(further_passes.FROZEN_LATER.format(", ".join(frozen)))
        parameters = [self.parameters[number] for number in missing]
        add_gradients(parameters, lambda: [self.zeros(parameter) for parameter in parameters]).backward()  # type: ignore[no-untyped-call]

    def zeros(self, parameter: Parameter) -> Tensor:
        """A gradient of zeros, sparse if DDP expects a sparse gradient."""
        if id(parameter) in self.sparse:
            return empty_gradient(parameter)
        return parameter.detach().new_zeros(()).expand_as(parameter)  # takes no memory


@contextmanager
def _record_arrivals(module: DistributedDataParallel) -> Iterator[_Reduction]:
    """Context manager: record the parameters of ``module`` that backward passes reach in the block."""
    reduction: _Reduction | None = vars(module).get(_REDUCTION)
    if reduction is None:
        reduction = vars(module)[_REDUCTION] = _Reduction(module)
    reduction.was_prepared = False
    reduction.arrived.clear()
    # Removed after the block, because a model with this hook could not be copied or pickled.
    handle = module.register_forward_hook(reduction.note_call)
    try:
        yield reduction
    finally:
        handle.remove()


class _Standin(Module):
    """A module that replaces the model inside of DDP. Its forward pass returns ``output``.

    It has the buffers of the model, because DDP's forward pass broadcasts them.
    """

    def __init__(self, output: Tensor, model: Module) -> None:
        super().__init__()
        self.output = output
        self.named_buffers = model.named_buffers  # type: ignore[method-assign]

    def forward(self, _: None) -> Tensor:
        return self.output


def _run_zero_pass(module: DistributedDataParallel, reduction: _Reduction) -> None:
    """Make a forward and a backward pass of ``module`` that add zeros to its gradients.

    DDP's forward pass prepares the backward pass and broadcasts buffers, as on the ranks that call the model.
    The model inside of DDP is not called.
    """
    if reduction.was_prepared:  # this rank has taken part in the broadcast of the buffers already
        module.require_forward_param_sync = False
    parameters, gradients = _gradients_of_zero_pass(module, reduction)
    model = module.module
    module.module = _Standin(add_gradients(parameters, lambda: gradients), model)
    try:
        with torch.enable_grad():
            # DDP needs an argument, because on a GPU DDP moves the first argument to the device.
            output = DistributedDataParallel.forward(module, None)  # type: ignore[no-untyped-call]
    finally:
        module.module = model
    with further_passes.reducing(module):
        output.backward()


def _gradients_of_zero_pass(
    module: DistributedDataParallel, reduction: _Reduction
) -> tuple[list[Parameter], list[Tensor | None]]:
    """The parameters that a backward pass of zeros must reach, and the gradients that the pass adds."""
    trained = [parameter for parameter in reduction.parameters if parameter.requires_grad]
    if module.static_graph:  # every backward pass must reach the same parameters
        reached = [reduction.parameters[number] for number in sorted(reduction.last_arrived)] or trained
    elif module.find_unused_parameters:
        reached = [parameter for parameter in trained if parameter.grad is not None]
        if not reached:  # DDP needs one parameter to start. It counts as unused, because it has no gradient.
            return trained[:1], [None]
    else:
        reached = trained
    return reached, [reduction.zeros(parameter) for parameter in reached]


def _sparse_parameters(module: Module) -> set[int]:
    """The ids of the parameters for which DDP expects sparse gradients."""
    embeddings = [part for part in module.modules() if isinstance(part, (Embedding, EmbeddingBag))]
    return {id(embedding.weight) for embedding in embeddings if embedding.sparse}
