"""What the ranks train together, and what they compare before: the model, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import Caller, check_same
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.data.model_buffers import parameters_by_group, remembered_models
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.training.gradient_sync import optimizers_of
from ignite_dist.training.samples import describe_difference, digest_of, is_whole, taken_from
from ignite_dist.training.unwrapped_states import bare_name, names_of_extra_state, unwrapped_state
from ignite_dist.values.gradients import parameters_of
from ignite_dist.values.layouts import describe_layout, layout_of


def named_tensors(model: Module) -> list[tuple[str, Tensor]]:
    """Names and tensors: first the parameters, then the buffers."""
    return [*model.named_parameters(), *model.named_buffers()]


def leaf_modules(model: Module) -> list[str]:
    """Names and classes of torch's modules without others inside: the activations, for example.

    A module of another class may be one rank's own: a metric, a logger.
    """
    leaves = [
        (name, one)
        for name, one in model.named_modules()
        if type(one).__module__.startswith("torch.nn.modules.") and next(one.children(), None) is None
    ]
    return [f"{type(one).__name__} {bare_name(name)!r}" for name, one in leaves]


def check_same_model(
    live: ComputationModel,
    compared: Iterable[tuple[Group, Sequence[tuple[str, Tensor]]]],
    caller: Caller,
    frozen_counts: bool = False,
    modules: Sequence[str] = (),
) -> None:
    """Raise on every rank of a group if their tensors differ in more than values. Each of them calls this.

    Args:
        live: the context.
        compared: groups, with the parameters and buffers that their ranks compare, by name.
        caller: the public function, with arguments that must be equal on all ranks.
        frozen_counts: True compares which parameters are frozen, too.
        modules: compared before the tensors.

    Raises:
        CollectiveMismatchError: names, order, kinds, shapes, dtypes or ``modules`` differ, or a rank has made
            another call.
    """
    texts = [
        (group, [*modules, *(_described_tensor(name, one, frozen_counts) for name, one in named)])
        for group, named in compared
        if len(group.ranks) > 1
    ]
    check_same(live, texts, caller, _SAME_MODEL)


_SAME_MODEL = "the same model on every rank, because all take the values of one rank"


def check_same_state(live: ComputationModel, model: Module, caller: str) -> None:
    """Raise on every rank if their models differ in what a loaded state fills. Every rank calls this.

    Of a model with shards that is what :func:`unwrapped_state` has, of others also the buffers that are not
    saved.

    Raises:
        CollectiveMismatchError: names, order, shapes or dtypes differ, or what has an extra state, or a rank
            has made another call.
    """
    extra = names_of_extra_state(model)
    state = unwrapped_state(model)  # with FSDP2 this shards again what a forward pass has gathered
    named = [(name, one) for name, one in state.items() if name not in extra]
    if not any(is_sharded(one) for _, one in named):
        named = named_tensors(model)
    texts = [f"{bare_name(name)!r}, {_layout(one)}" for name, one in named]
    texts += [f"an extra state {name!r}" for name in sorted(extra)]
    check_same(live, [(live.groups.world, texts)], Caller(caller), _SAME_MODEL)


def _described_tensor(name: str, tensor: Tensor, frozen_counts: bool) -> str:
    kind = "parameter" if isinstance(tensor, Parameter) else "buffer"
    is_frozen = frozen_counts and kind == "parameter" and not tensor.requires_grad
    return f"{kind} {bare_name(name)!r}, {_layout(tensor)}{', frozen' * is_frozen}"


def _layout(tensor: Tensor) -> str:
    layout = f"{tensor.dtype} of unknown shape" if is_lazy(tensor) else describe_layout(layout_of(tensor))
    return f"{layout}, DTensor {tensor.placements}" if is_sharded(tensor) else layout  # type: ignore[attr-defined]


def check_same_optimizer(
    live: ComputationModel, optimizer: Optimizer, arguments: str, process_set: Any
) -> None:
    """Raise on every rank of a group that trains together if their optimizers differ. Each calls this.

    All parameters are compared where ``auto_optim`` averages their gradients (not with a ``process_set`` of
    Horovod, which may be of some ranks); else those of models of ``auto_model``.

    The first rank of a group warns if the values of parameters differ that ``auto_model`` has made equal.

    Raises:
        CollectiveMismatchError: classes, numbers, order or shapes of parameters, settings or ``arguments``
            differ, or a rank has made another call.
    """
    parameters, has_settings = list(parameters_of(optimizer)), not live.training.shares_optimizers
    trained = parameters_by_group(live)
    equal = {group.ranks: {*map(id, shared)} for group, shared in trained}
    if not live.training.averages_in_backward:
        trained = [(live.groups.world, parameters)] if process_set is None else []
    own = {*map(id, parameters)}
    by_group = [(group, own & {*map(id, shared)}) for group, shared in trained if len(group.ranks) > 1]
    by_group = [(group, ids) for group, ids in by_group if ids]
    compared = [(group, [*_described_optimizer(optimizer, ids, has_settings)]) for group, ids in by_group]
    samples = [
        _samples(live, [one for one in parameters if id(one) in ids & equal.get(group.ranks, set())])
        for group, ids in by_group
    ]
    caller, needed = Caller("auto_optim", arguments), "the same optimizer on every rank that trains the model"
    rows_by_group = check_same(live, compared, caller, needed, [digests for _, digests in samples])
    for (group, _), (names, _), rows in zip(by_group, samples, rows_by_group, strict=True):
        if rows:
            _warn_of_difference(live, group, names, rows)


def _samples(live: ComputationModel, parameters: Iterable[Parameter]) -> tuple[list[str], list[str]]:
    """The names of the whole ones among ``parameters``, and a digest of some values of each."""
    names = {id(one): name for model in remembered_models(live) for name, one in model.named_parameters()}
    whole = [one for one in parameters if is_whole(one)]
    taken = taken_from({str(number): one for number, one in enumerate(whole)})
    return [names.get(id(one), "parameter") for one in whole], [*map(digest_of, taken.values())]


def _warn_of_difference(
    live: ComputationModel, group: Group, names: list[str], rows: list[Sequence[str]]
) -> None:
    """Warn on the first rank of the group."""
    by_rank = [dict(zip(group.ranks, column, strict=True)) for column in zip(*rows, strict=False)]
    found = (describe_difference(*one) for one in zip(names, by_rank, strict=False))
    difference = next(filter(None, found), "")
    if difference and live.get_rank() == group.ranks[0]:
        warn_user(f"{difference} {_LOAD_ON_ALL}")


_LOAD_ON_ALL = (
    "Each rank would go on training its own. Usually some ranks have loaded weights after auto_model, for "
    "example from a file that only one node has, or a step depended on the rank. Load them before "
    "auto_model, which gives every rank the same values, or with idist.load_model_state or "
    "idist.load_checkpoint."
)


def trained_together(
    live: ComputationModel, model: Module, optimizers: Optimizer | Sequence[Optimizer] | None = None
) -> list[tuple[Group, list[Parameter]]]:
    """The parameters of ``model`` that the ranks of each group train together.

    Empty if an optimizer of Horovod averages over some ranks only, or none is known: then it, and not
    ``auto_model``, decides which ranks train together. ``optimizers``: see :func:`optimizers_of`.
    """
    if live.training.shares_optimizers:
        known = optimizers_of(live, model, optimizers)
        try:
            group = live.training.gradient_group(model, known)
        except ValueError:  # the optimizers have different process sets
            return []
        if not known or len(group.ranks) < live.get_world_size():
            return []
    own = {id(one) for one in model.parameters()}
    found = [
        (group, [one for one in shared if id(one) in own]) for group, shared in parameters_by_group(live)
    ]
    return [(group, parameters) for group, parameters in found if parameters and len(group.ranks) > 1]


def _described_optimizer(optimizer: Optimizer, ids: set[int], has_settings: bool) -> Iterator[str]:
    """What is compared of an optimizer.

    Args:
        optimizer: the optimizer.
        ids: of the parameters that are compared.
        has_settings: False leaves out the state and the settings.
    """
    kind = type(optimizer).__name__
    yield kind
    if has_settings:
        has_state = any(id(one) in ids for one in getattr(optimizer, "state", ()))
        yield f"{kind} with{'' if has_state else 'out'} a state"
    groups = [
        (group, shapes)
        for group in optimizer.param_groups
        if (shapes := [tuple(one.shape) for one in group["params"] if id(one) in ids])
    ]
    for number, (group, shapes) in enumerate(groups):
        name = f"group {number}"
        yield f"{name}: {len(shapes)} parameters"
        yield from (f"{name}, parameter {position}: shape {shape}" for position, shape in enumerate(shapes))
        if has_settings:
            texts = {
                str(key): _described_setting(one) for key, one in group.items() if key not in _NOT_COMPARED
            }
            yield from (f"{name}: {key}={text}" for key, text in sorted(texts.items()) if text)


# The parameters, their names, and how a rank's device computes the step.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable")


def _described_setting(value: Any) -> str:
    """The text of a setting: one for equal numbers of all types, and empty for other objects than numbers.

    The text of another object may have an address, which differs between ranks.
    """
    if isinstance(value, (tuple, list)):
        parts = [_described_setting(one) for one in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, (bool, str, type(None))):
        return repr(value)
    return f"{float(value):.7g}" if isinstance(value, Real) else ""  # the digits of a float32
