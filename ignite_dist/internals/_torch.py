"""All private names of torch that the package uses.

:data:`PRIVATE_NAMES` gives the reason for each name. Other files use the functions below. ``ignite-dist env``
and the tests look up each name in the installed torch. The private names of Horovod and torch_xla are in the
folders of their backends.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, _utils
from torch import _tensor as torch_tensor
from torch._C._dynamo import eval_frame
from torch.distributed import DeviceMesh, ProcessGroup, device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ignite_dist.internals.private_names import PrivateName, missing

_OLD = "2.9 or older"  # 2.9 is the oldest torch that the package supports
_NO_IMPORT = "none: `import ignite_dist` fails, with this name in the message"
_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_OPTIMIZER = "torch.optim.Optimizer"
_VARIABLES = "torch._dynamo.variables.functions"

_NAMES = (
    (
        f"{_C10D}._world",
        "Every get_rank() reads default_pg. The public `torch.distributed.group.WORLD` takes twice the time. "
        "No public function lists the groups, or returns the backend and the store of a group. Making a "
        "new group needs both.",
        _NO_IMPORT,
    ),
    (
        f"{_C10D}._new_process_group_helper",
        "new_group() names a group by the number of earlier groups of the rank. Ranks with different numbers "
        "would wait for each other for ever.",
        "none: new_group() without options, and a collective with a list of ranks, raise AttributeError",
    ),
    (
        f"{_C10D}._abort_process_group",
        "ProcessGroup.abort() ends one group but does not remove it from torch's tables. "
        "destroy_process_group() waits for the other ranks.",
        "none: ending a context after a failure raises AttributeError",
    ),
    (
        "torch.distributed.ProcessGroup._allgather_base",
        "torch.distributed.all_gather_into_tensor() adds 15-25 us. all_gather_single() is newer than 2.9.",
        "none: an all-gather that is too large for one round raises AttributeError",
    ),
    *(
        (name, "No public function gives the timeout of a group.", "none: new_group() raises AttributeError")
        for name in (
            "torch.distributed.ProcessGroup._get_backend",
            "torch._C._distributed_c10d.Backend.Options._timeout",
        )
    ),
    (
        "torch._C._distributed_c10d.Backend._get_sequence_number_for_group",
        "The watchdog compares the number of collectives of each rank, also from other libraries. No public "
        "function counts them.",
        "none: the watchdog's thread fails at its first check",
    ),
    (
        "torch.distributed.ProcessGroup._device_types",
        "No public function names the devices of a group. Each may have a backend with a number of its own.",
        "none: the watchdog's thread fails at its first check",
    ),
    (
        "torch.distributed.device_mesh._mesh_resources",
        "No public function returns the mesh of a `with mesh:` block.",
        "none: auto_model and auto_dataloader raise AttributeError",
    ),
    (
        "torch.distributed._functional_collectives",
        "The watchdog recognizes a waiting rank by a frame of this module.",
        "the watchdog does not notice a wait in a functional collective that the user called",
    ),
    (
        "torch.utils.data.DataLoader._index_sampler",
        "A pass in the middle of an epoch draws from the sampler from there on. A sampler of another class "
        "would not be the one that scripts look at.",
        "none: passes begin at the first batch, with the order of the global random state",
    ),
    *(
        (
            name,
            "A wait in the forward pass of FSDP2 is recognized by these frames, and named forward.",
            "such a wait is named after a function of torch",
        )
        for name in (
            "torch._dynamo.eval_frame",
            "torch.distributed.fsdp._fully_shard._fsdp_common",
            "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_forward",
            "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._post_forward",
        )
    ),
    (
        "torch.utils.data.DataLoader._iterator",
        "Persistent workers have a copy of the data set. New ones get the epoch that set_epoch gave it.",
        "none: persistent workers keep the epoch of their start",
    ),
    (
        "torch.nn.Module.state_dict._metadata",
        "The versions of the modules, by path. No public function renames a path in the middle.",
        "states with other names are loaded as those of modules without versions",
    ),
    (
        "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
        "Its broadcasts do not know int16, uint16, uint32, uint64 and float8. Nothing public leaves such "
        "buffers out.",
        "none: auto_model raises AttributeError for models with such buffers",
    ),
    (
        "torch._C._distributed_c10d.Reducer._check_reducer_finalized",
        "Shows if DDP has averaged in a backward pass, or waits for gradients of a later one.",
        "none: a backward pass of a DistributedDataParallel model raises AttributeError",
    ),
    (
        "torch._C._distributed_c10d.Reducer._rebuild_buckets",
        "In the first forward pass after an average DDP orders its buckets anew, which is a collective. A "
        "rank that skips this pass makes it too.",
        "none: accumulate_gradients raises AttributeError",
    ),
    (
        "torch._C._current_graph_task_id",
        "Shows if two hooks are of the same backward pass.",
        "none: the import of this package raises AttributeError",
    ),
    (
        "torch.Tensor._version",
        "Shows if a gradient changed after it was averaged. The public increment_version() only writes it.",
        "none: optimizers that average gradients raise AttributeError",
    ),
    (
        "torch.Tensor._base",
        "XLA tensors have no strides. A tensor larger than its base has elements that share memory.",
        "none: collectives of XLA tensors raise AttributeError",
    ),
    (
        "torch.Tensor._is_view",
        "torch_xla does not update the base of a view. No public function tells if a tensor is a view.",
        "none: all_reduce of XLA tensors raises AttributeError",
    ),
    (
        "torch.save._use_new_zipfile_serialization",
        "For a small object, torch.save() writes a zip archive of 1,260 bytes. The older format needs 150 "
        "bytes, which fit in the header of a message.",
        "none: sending objects after safe_objects() raises TypeError",
    ),
    *(
        (
            name,
            "torch pickles a tensor with its whole storage. A smaller pickle needs the function that torch "
            "chose for a tensor, and the place of the storage in its arguments.",
            _NO_IMPORT,
        )
        for name in (
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_tensor_v3",
            "torch._utils._rebuild_qtensor",
            "torch._tensor._rebuild_from_type_v2",
        )
    ),
    *(
        (
            name,
            "torch pickles tensors with a TypedStorage. Its public methods warn that it is deprecated.",
            "none: sending an object with tensors raises an error",
        )
        for name in ("torch.TypedStorage._untyped_storage", "torch.TypedStorage.__new__._internal")
    ),
    (
        "torch.nn.modules.batchnorm._BatchNorm",
        "The common base class of all BatchNorm modules, also of user classes.",
        "none: auto_model(sync_bn=True) over Horovod on GPUs raises AttributeError",
    ),
    (
        f"{_DDP}._register_builtin_comm_hook",
        "The only way to use torch's C++ hooks.",
        "none: auto_model(comm_hook=BuiltinCommHookType...) raises AttributeError, other hooks work",
    ),
    (
        f"{_DDP}._register_buffer_comm_hook",
        "The only way to register a hook for buffers.",
        "none: auto_model(buffer_hook=) raises AttributeError",
    ),
    (
        "torch.distributed.Reducer._update_process_group",
        "A DistributedDataParallel whose own group is not the world cannot be pickled.",
        "none: auto_model on one machine raises AttributeError",
    ),
    (
        f"{_DDP}._join_config",
        "Shows if a DistributedDataParallel is in torch's Join, in which a rank without data sends zeros for "
        "several models in another order than the others.",
        "none: auto_model on one machine raises AttributeError",
    ),
    (
        f"{_DDP}._static_graph_delay_allreduce_enqueued",
        "Shows if a DistributedDataParallel with static_graph=True has finished its first backward pass. "
        "Accumulation before that pass fails deep inside torch.",
        "none: accumulation with static_graph=True raises AttributeError",
    ),
    (
        f"{_DDP}._set_params_and_buffers_to_ignore_for_model._ddp_params_and_buffers_to_ignore",
        "With this function, the user lists the parameters and buffers that DDP must ignore. torch stores "
        "the list only in this attribute of the module.",
        "no parameter or buffer is ignored",
    ),
    *(
        (
            name,
            "ZeRO makes a new optimizer. The hooks are copied to it, and no public function returns them.",
            "none: auto_optim raises AttributeError",
        )
        for name in (f"{_OPTIMIZER}._optimizer_step_pre_hooks", f"{_OPTIMIZER}._optimizer_step_post_hooks")
    ),
    (
        "torch.optim.lr_scheduler.LRScheduler.__init__._wrapped_by_lr_sched",
        "ZeRO makes a new optimizer, which a scheduler made before does not change. If it has been "
        "deleted since, only this mark on the optimizer's step is left.",
        "a scheduler made before auto_optim(zero=True) and deleted since is no error",
    ),
    (
        "torch._dynamo",
        "The constructor of DDP imports this module, for seconds. The fork server imports it in idle time.",
        "each worker imports the module itself",
    ),
    (
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "The module inside a compiled module. No public function returns it.",
        "none: unwrap_model of a compiled model raises AttributeError",
    ),
    *(
        (
            name,
            "torch.compiler.disable(), assume_constant_result() and substitute_in_graph() import the tracer, "
            "which takes half a second.",
            fallback,
        )
        for name, fallback in (
            ("torch._C._dynamo.eval_frame.set_code_exec_strategy", _NO_IMPORT),
            ("torch._C._dynamo.eval_frame._FrameAction", _NO_IMPORT),
            ("torch._C._dynamo.eval_frame._FrameExecStrategy", _NO_IMPORT),
            (
                f"{_VARIABLES}.SkipFunctionVariable._torchdynamo_disable",
                "none: torch.compile traces into torch.distributed and fails",
            ),
            (
                f"{_VARIABLES}.SkipFunctionVariable._torchdynamo_disable_msg",
                "graph breaks of torch.compile have no reason in their message",
            ),
            (
                f"{_VARIABLES}.UserFunctionVariable._torchdynamo_inline",
                "collectives are graph breaks for torch.compile",
            ),
            (
                f"{_VARIABLES}.UserFunctionVariable._dynamo_marked_constant",
                "getters are graph breaks for torch.compile",
            ),
        )
    ),
    (
        "torch.autograd.Variable._execution_engine",
        "No public function runs code at the end of a backward pass. torch's model wrappers use this one.",
        "none: a backward pass over Horovod raises AttributeError",
    ),
)
PRIVATE_NAMES = tuple(PrivateName(*entry, since=_OLD) for entry in _NAMES)


def check() -> list[PrivateName]:
    """The :data:`PRIVATE_NAMES` that the installed torch lacks."""
    return missing(PRIVATE_NAMES)  # imports the tracer, which takes half a second


# --- process groups ----------------------------------------------------------------------------------

# Not a function, for speed: is_current() reads `WORLD_STATE.default_pg` on every call of a getter.
WORLD_STATE = distributed_c10d._world


def groups_and_stores() -> list[tuple[ProcessGroup, tuple[str, Any]]]:
    """Each live group of this rank, with its backend and its store."""
    return list(WORLD_STATE.pg_map.items())


def backend_and_store(group: ProcessGroup) -> tuple[str, Any]:
    """The backend and the store of a live group.

    Raises:
        KeyError: the group was destroyed.
    """
    return WORLD_STATE.pg_map[group]


def is_live(group: Any) -> bool:
    """True if ``group`` is a group of this rank that has not been destroyed."""
    return group in WORLD_STATE.pg_map


def ranks_of_groups() -> list[set[int]]:
    """The ranks of each group that this rank knows."""
    groups = list(WORLD_STATE.pg_group_ranks.values())  # a copy: another thread may add a group
    return [set(ranks) for ranks in groups]


def new_group_by_name(
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Any,
    timeout: timedelta,
    description: str,
) -> Any:
    """Make a group of global ``ranks``. Only the members need to call this function.

    ``name`` must be new, and equal on all members. The members find each other through ``store``.

    Returns:
        The group, or ``GroupMember.NON_GROUP_MEMBER`` on a rank outside the group.
    """
    handle, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank) if rank in ranks else None,
        list(ranks),
        backend,
        store,
        group_name=name,  # type: ignore[arg-type]
        timeout=timeout,
        group_desc=description,
    )
    if handle is not dist.GroupMember.NON_GROUP_MEMBER:
        WORLD_STATE.pg_group_ranks[handle] = {member: position for position, member in enumerate(ranks)}
    return handle


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What a loader of torch's own class draws from: indices, or lists of them."""
    return DataLoader._index_sampler.fget(loader)  # type: ignore[attr-defined]


def forget_workers(loader: DataLoader[Any]) -> None:
    """Let the next pass of a loader with persistent workers start new ones."""
    loader._iterator = None


def abort_process_groups() -> None:
    """End all groups of this rank, without communication."""
    distributed_c10d._abort_process_group()


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """The timeout of a group's collectives on ``device``; torch's default if the backend has no options."""
    backend = group._get_backend(device) if isinstance(group, ProcessGroup) else group
    options: Any = getattr(backend, "options", None)
    return options._timeout if options else default_pg_timeout


def sequence_number(group: Any) -> int | None:
    """Number of collectives that this rank has begun in a group; None if a backend does not count.

    A group may have a backend per type of device. Its own number is that of one of them.
    """
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        numbers = {id(backend): int(backend._get_sequence_number_for_group()) for backend in backends}
        return sum(numbers.values())
    except RuntimeError:
        return None


def entered_meshes() -> list[DeviceMesh]:
    """The meshes of the ``with mesh:`` blocks that this thread is in, from the outside in."""
    return device_mesh._mesh_resources.mesh_stack


def all_gather_into(
    group: ProcessGroup, out: Tensor, tensor: Tensor, options: distributed_c10d.AllgatherOptions
) -> dist.Work:
    """Begin to fill the 1-d ``out`` with the 1-d ``tensor`` of each rank."""
    return group._allgather_base(out, tensor, options)


DYNAMO = "torch._dynamo"
"""The module that the constructor of DDP imports."""
WRAPPER_MODULES = ("torch._dynamo.eval_frame", "torch.distributed.fsdp._fully_shard._fsdp_common")
"""Modules of functions that wrap others, in frames."""
_FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
CALLED_AS = {(_FSDP_STATE, hook): "forward" for hook in ("_pre_forward", "_post_forward")}
"""What users call when torch calls a function of a module."""
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""The ``__name__`` of this torch module, in its frames."""


# --- tensors and backward passes ---------------------------------------------------------------------

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Number of in-place changes of a tensor. An ``attrgetter``, for speed: it runs for each gradient."""

storage_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The base of a view; None if the tensor is not a view."""

is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""True if a tensor is a view of another tensor."""


def save_short(value: Any, file: IO[bytes], pickle_module: Any) -> None:
    """``torch.save`` in the older and shorter format."""
    torch.save(value, file, pickle_module, _use_new_zipfile_serialization=False)


# The functions with which torch pickles a view: storage, offset, size, stride and more.
REBUILDS_OF_VIEWS = (_utils._rebuild_tensor_v2, _utils._rebuild_tensor_v3, _utils._rebuild_qtensor)
# The one for dtypes without a class of storages: uint16 to uint64, float8.
rebuild_newer_dtype = _utils._rebuild_tensor_v3
# For a subclass, or a tensor with attributes: one of these functions, the type, its arguments.
rebuild_with_type = torch_tensor._rebuild_from_type_v2

untyped: Callable[[torch.TypedStorage], torch.UntypedStorage] = attrgetter("_untyped_storage")
"""The storage in a ``TypedStorage``, without the warning of ``untyped()``."""


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """A ``TypedStorage``, which torch needs to unpickle a tensor, without its warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


@contextmanager
def left_out_of_ddp(model: Module, names: Collection[str]) -> Iterator[None]:
    """A ``DistributedDataParallel`` that is made in the block around ``model`` leaves these buffers alone."""
    if not names:
        yield
        return
    ignored = list(ignored_by_ddp(model))
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, [*ignored, *names])
    try:
        yield
    finally:
        ignore(model, ignored)


number_of_backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is running in this thread."""


def run_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the current backward pass, unless the pass fails."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# --- modules and optimizers --------------------------------------------------------------------------


def register_builtin_hook(wrapper: Any, hook: dist.BuiltinCommHookType) -> None:
    """Register one of torch's C++ communication hooks on a ``DistributedDataParallel``."""
    wrapper._register_builtin_comm_hook(hook)


def register_buffer_hook(wrapper: Any, *hook: Any) -> None:
    """Register ``(state, function)`` or ``(state, function, location)`` as DDP's hook for buffers."""
    wrapper._register_buffer_comm_hook(*hook)


def reduce_gradients_in(wrapper: DistributedDataParallel, group: ProcessGroup) -> None:
    """Let ``wrapper`` average gradients in ``group``, which has the same ranks as its process group."""
    wrapper.reducer._update_process_group(group)


def has_learnt_static_graph(wrapper: DistributedDataParallel) -> bool:
    """True if a wrapper with ``static_graph=True`` has run a backward pass that averages gradients."""
    return bool(wrapper._static_graph_delay_allreduce_enqueued)


def is_in_join(wrapper: DistributedDataParallel) -> bool:
    """True on all ranks in a block of torch's ``Join``, and after it."""
    return bool(wrapper._join_config.enable)


def has_reduced(wrapper: DistributedDataParallel) -> bool:
    """True unless a backward pass has reached some parameters, and the wrapper waits for the others."""
    try:
        wrapper.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def rebuild_buckets(wrapper: DistributedDataParallel) -> None:
    """Order the buckets of gradients as the last backward pass did, if the next forward pass would."""
    wrapper.reducer._rebuild_buckets()


def ignored_by_ddp(module: Module) -> Iterable[str]:
    """The names of the parameters and buffers that ``DistributedDataParallel`` does not synchronize."""
    names: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def is_batch_norm(module: Module) -> bool:
    """True if ``SyncBatchNorm`` can replace the module."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def step_hooks(optimizer: Optimizer) -> tuple[MutableMapping[int, Any], MutableMapping[int, Any]]:
    """Hooks that run before and after each step, by handle id."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def has_had_scheduler(optimizer: Optimizer) -> bool:
    """True if a scheduler of torch was made for ``optimizer``, also if it has been deleted since."""
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")


INSIDE_OF_COMPILED = "_orig_mod"
"""The name of the original module in a compiled module."""


def inside_of_compiled(model: Module) -> Module | None:
    """The original module of a compiled module; None if ``model`` is not compiled."""
    compiler: ModuleType | Any = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    if compiler is None or not isinstance(model, compiler.OptimizedModule):
        return None
    inside: Module = getattr(model, INSIDE_OF_COMPILED)
    return inside


def renamed_state(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """A copy of a state dict with other names, also of the modules whose versions it has."""
    renamed: Any = OrderedDict((rename(str(name)), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = OrderedDict((rename(path), dict(one)) for path, one in versions.items())
    return renamed  # type: ignore[no-any-return]


# --- marks for the tracer of torch.compile -----------------------------------------------------------

_SKIP = eval_frame._FrameAction.SKIP
# Skip the frame and all frames below it. Without this, the tracer tries each frame after a graph break.
_SKIP_ALL = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_MARKS = {"_torchdynamo_disable", "_torchdynamo_inline", "_dynamo_marked_constant"}


def run_without_compiler(code: CodeType) -> None:
    """Make the tracer skip frames of ``code`` and all calls inside them."""
    eval_frame.set_code_exec_strategy(code, _SKIP_ALL)


def mark_as_untraced(function: Any, message: str) -> None:
    """Like ``torch.compiler.disable``: a call is a graph break with ``message`` as its reason."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = message


def mark_replacement(function: Any, replacement: Callable[..., Any]) -> None:
    """Like ``torch.compiler.substitute_in_graph``: the tracer traces ``replacement`` instead."""
    function._torchdynamo_inline = replacement


def mark_as_constant(function: Any) -> None:
    """Like ``torch.compiler.assume_constant_result``: the tracer treats the result as a constant."""
    function._dynamo_marked_constant = True


def has_mark_of_compiler(function: FunctionType) -> bool:
    """True if ``function`` has one of the marks above."""
    return not _MARKS.isdisjoint(vars(function))
