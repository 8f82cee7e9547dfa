"""torch's private names. No other file of the package uses one.

:data:`PRIVATE_NAMES` says of each why no public name does. The functions below are the way to use them.
``ignite-dist env`` and the tests look each of them up in the torch that is installed.

Horovod's and torch_xla's are in the folders of their backends.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from datetime import timedelta
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = [
    "FUNCTIONAL_COLLECTIVES",
    "PRIVATE_NAMES",
    "WORLD_STATE",
    "PrivateName",
    "abort_process_groups",
    "all_gather_into",
    "backend_and_store",
    "check",
    "groups_and_stores",
    "has_learnt_static_graph",
    "has_mark_of_compiler",
    "ignored_by_ddp",
    "inside_of_compiled",
    "is_batch_norm",
    "is_live",
    "is_view",
    "mark_as_constant",
    "mark_as_untraced",
    "mark_replacement",
    "missing",
    "new_group_by_name",
    "ranks_of_groups",
    "register_buffer_hook",
    "register_builtin_hook",
    "run_after_backward",
    "run_without_compiler",
    "save",
    "sequence_number",
    "step_hooks",
    "step_pre_hooks",
    "storage_base",
    "timeout_of",
    "version_of",
]


class PrivateName(NamedTuple):
    """A name that a library does not promise to keep."""

    name: str
    """Dotted, from the module on. The last part may be one that is found in the code of the object before it:
    an attribute that a class gives its objects, say."""
    why: str
    """Why no public name does."""
    since: str
    """The oldest release of the library that is known to have it."""
    fallback: str
    """What the package does where it is missing."""


_OLD = "2.9 or older"  # 2.9 is the oldest torch that the package supports
_NO_IMPORT = "none: `import ignite_dist` fails, with this name in the message"
_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_VARIABLES = "torch._dynamo.variables.functions"

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    PrivateName(
        f"{_C10D}._world",
        "Every get_rank() reads default_pg. The public `torch.distributed.group.WORLD` is the same object at "
        "twice the time. No public function lists the groups, or gives a group's backend and store as they "
        "go into another group.",
        _OLD,
        _NO_IMPORT,
    ),
    PrivateName(
        f"{_C10D}._new_process_group_helper",
        "new_group() names a group after the number of groups that the rank has made. Ranks with different "
        "histories would then wait for each other for ever.",
        _OLD,
        "none: new_group() without options, and a collective with a list of ranks, raise AttributeError",
    ),
    PrivateName(
        f"{_C10D}._abort_process_group",
        "ProcessGroup.abort() ends one group and leaves it in torch's tables. destroy_process_group() waits "
        "for the other ranks.",
        _OLD,
        "none: the end of a context after a failure raises AttributeError",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._allgather_base",
        "torch.distributed.all_gather_into_tensor() logs and counts around it, 15-25 us a call. A public "
        "method, all_gather_single(), is younger than torch 2.9.",
        _OLD,
        "none: an all-gather that is too large for one round raises AttributeError",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._get_backend",
        "No public function gives the timeout of a group.",
        _OLD,
        "none: as _new_process_group_helper",
    ),
    PrivateName(
        "torch._C._distributed_c10d.Backend.Options._timeout",
        "No public function gives the timeout of a group.",
        _OLD,
        "none: as _new_process_group_helper",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "The watchdog compares how many calls each rank has begun, also those of other libraries. No public "
        "function counts them.",
        _OLD,
        "none: the watchdog's thread fails when it looks",
    ),
    PrivateName(
        "torch.distributed._functional_collectives",
        "The module of a frame in which a rank waits for others.",
        _OLD,
        "the watchdog does not see a rank wait in a functional collective of the user's own",
    ),
    PrivateName(
        "torch.Tensor._version",
        "Tells whether a gradient has been changed since it was averaged. torch.autograd.graph has only "
        "increment_version(), which writes it.",
        _OLD,
        "none: optimizers that average gradients raise AttributeError",
    ),
    PrivateName(
        "torch.Tensor._base",
        "An XLA tensor has no strides: only its base tells whether elements share memory.",
        _OLD,
        "none: collectives of XLA tensors raise AttributeError",
    ),
    PrivateName(
        "torch.Tensor._is_view",
        "torch_xla leaves the base of a view as it was. No public function says what a view is.",
        _OLD,
        "none: all_reduce of XLA tensors raises AttributeError",
    ),
    PrivateName(
        "torch.save._use_new_zipfile_serialization",
        "A zip archive, the default of torch.save(), takes 1,260 bytes for a small object, and the older "
        "format 150. Only the latter fits the header of a message.",
        _OLD,
        "none: objects sent as safe ones raise TypeError",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._BatchNorm",
        "The one class of BatchNorm modules of all dimensions, those of users too.",
        _OLD,
        "none: auto_model(sync_bn=True) over Horovod on GPUs raises AttributeError",
    ),
    PrivateName(
        f"{_DDP}._register_builtin_comm_hook",
        "The only way to torch's hooks in C++.",
        _OLD,
        "none: auto_model(comm_hook=BuiltinCommHookType...) raises AttributeError, other hooks work",
    ),
    PrivateName(
        f"{_DDP}._register_buffer_comm_hook",
        "The only way to a hook for buffers.",
        _OLD,
        "none: auto_model(buffer_hook=) raises AttributeError",
    ),
    PrivateName(
        f"{_DDP}._static_graph_delay_allreduce_enqueued",
        "Tells whether a DistributedDataParallel with static_graph=True has had its first backward pass. "
        "Accumulation before that one is an error deep inside of torch.",
        _OLD,
        "none: accumulation with static_graph=True raises AttributeError, without it works",
    ),
    PrivateName(
        f"{_DDP}._set_params_and_buffers_to_ignore_for_model._ddp_params_and_buffers_to_ignore",
        "Which parameters and buffers are each rank's own: the user says so to torch by the function, and "
        "torch notes it on the module alone.",
        _OLD,
        "no parameter or buffer counts as a rank's own",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        "register_step_pre_hook() does not say whether a hook is there already. And ZeRO's optimizer is a "
        "new one, which takes the hooks over.",
        _OLD,
        "none: auto_optim raises AttributeError",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_post_hooks",
        "ZeRO's optimizer is a new one, which takes the hooks over.",
        _OLD,
        "none: auto_optim(zero=True) raises KeyError",
    ),
    PrivateName(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "The module inside of what torch.compile has put around it. No public function takes that off.",
        _OLD,
        "none: unwrap_model of a compiled model raises AttributeError",
    ),
    *(
        PrivateName(
            name,
            "torch.compiler.disable(), assume_constant_result() and substitute_in_graph() import the tracer, "
            "which takes half a second.",
            _OLD,
            fallback,
        )
        for name, fallback in (
            ("torch._C._dynamo.eval_frame.set_code_exec_strategy", _NO_IMPORT),
            ("torch._C._dynamo.eval_frame._FrameAction", _NO_IMPORT),
            ("torch._C._dynamo.eval_frame._FrameExecStrategy", _NO_IMPORT),
            (
                f"{_VARIABLES}.SkipFunctionVariable._torchdynamo_disable",
                "none: torch.compile follows calls of the package into torch.distributed",
            ),
            (
                f"{_VARIABLES}.SkipFunctionVariable._torchdynamo_disable_msg",
                "a graph break of torch.compile does not say why",
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
    PrivateName(
        "torch.autograd.Variable._execution_engine",
        "No public function runs something at the end of a backward pass. torch's own wrappers of models use "
        "queue_callback() of this object.",
        _OLD,
        "none: a backward pass over Horovod raises AttributeError",
    ),
)


def check() -> list[PrivateName]:
    """Those of :data:`PRIVATE_NAMES` that the installed torch lacks. Imports the tracer: half a second."""
    return missing(PRIVATE_NAMES)


def missing(names: Iterable[PrivateName]) -> list[PrivateName]:
    """Those of ``names`` that the installed libraries lack."""
    return [one for one in names if not _is_found(one.name)]


def _is_found(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
        return True
    except (ImportError, AttributeError):
        owner, _, last = name.rpartition(".")
    try:
        return last in _names_in_code_of(pkgutil.resolve_name(owner))
    except (ImportError, AttributeError):
        return False


def _names_in_code_of(owner: Any) -> Iterator[str]:
    """The parameters, and the names and strings in the code of a function, or of the methods of a class."""
    for member in vars(owner).values() if isinstance(owner, type) else (owner,):
        function = getattr(member, "__func__", member)  # of a class method
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if isinstance(function, FunctionType):
            yield from _names_in(function.__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):  # a function inside
            yield constant.co_name
            yield from _names_in(constant)


# --- process groups ----------------------------------------------------------------------------------

# The object itself and no function: is_current(), which every getter calls, reads `WORLD_STATE.default_pg`.
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
    """The ranks of each group that this rank knows of."""
    groups = list(WORLD_STATE.pg_group_ranks.values())  # others may be made meanwhile
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
    """A group of the rank's choice of ``name``, which needs its members only.

    Args:
        name: the same on each member, and of no group before.
        ranks: of the world.
        rank: this rank.
        backend: as :func:`backend_and_store` gives it.
        store: where the members meet.
        timeout: of its collectives.
        description: for messages.

    Returns:
        The group; ``GroupMember.NON_GROUP_MEMBER`` on ranks that are no members.
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
        WORLD_STATE.pg_group_ranks[handle] = {one: position for position, one in enumerate(ranks)}
    return handle


def abort_process_groups() -> None:
    """End the groups of this rank without a word to the other ranks."""
    distributed_c10d._abort_process_group()


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group's collectives on ``device``; torch's default if its backend does not say."""
    options: Any = getattr(group._get_backend(device), "options", None)
    return options._timeout if options else default_pg_timeout


def sequence_number(group: Any) -> int | None:
    """How many calls of a group this rank has begun; None if its backend does not count."""
    try:
        number: int = group._get_sequence_number_for_group()
        return number
    except RuntimeError:
        return None


def all_gather_into(
    group: ProcessGroup, out: Tensor, tensor: Tensor, options: distributed_c10d.AllgatherOptions
) -> dist.Work:
    """Begin to fill the 1-d ``out`` with the 1-d ``tensor`` of each rank."""
    return group._allgather_base(out, tensor, options)


FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""The name of a module, as a frame in it has it."""


# --- tensors and backward passes ---------------------------------------------------------------------

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often the values of a tensor have been changed in place. (For each gradient: no function of Python.)"""


def storage_base(tensor: Tensor) -> Tensor | None:
    """The tensor that ``tensor`` is a view of; None if it is none."""
    return tensor._base


def is_view(tensor: Tensor) -> bool:
    """True if ``tensor`` is a view of another one."""
    return tensor._is_view()


def save(value: Any, file: IO[bytes], pickle_module: Any, protocol: int, *, as_zip: bool) -> None:
    """As ``torch.save``, in its default format, a zip archive, or in its older and shorter one."""
    torch.save(value, file, pickle_module, protocol, _use_new_zipfile_serialization=as_zip)


def run_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the running backward pass, unless that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# --- modules and optimizers --------------------------------------------------------------------------


def register_builtin_hook(wrapper: Any, hook: dist.BuiltinCommHookType) -> None:
    """Have a ``DistributedDataParallel`` average by one of torch's hooks in C++."""
    wrapper._register_builtin_comm_hook(hook)


def register_buffer_hook(wrapper: Any, *hook: Any) -> None:
    """Have a ``DistributedDataParallel`` synchronise its buffers by a state, a function, and when."""
    wrapper._register_buffer_comm_hook(*hook)


def has_learnt_static_graph(wrapper: DistributedDataParallel) -> bool:
    """True if a wrapper with ``static_graph=True`` has seen a backward pass that averages gradients."""
    return bool(wrapper._static_graph_delay_allreduce_enqueued)


def ignored_by_ddp(module: Module) -> Iterable[str]:
    """The names of the parameters and buffers that ``DistributedDataParallel`` leaves as each rank's own."""
    names: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def is_batch_norm(module: Module) -> bool:
    """True for the modules that a ``SyncBatchNorm`` can stand in for."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def step_pre_hooks(optimizer: Optimizer) -> MutableMapping[int, Any]:
    """What runs before each step, by the numbers of the handles."""
    return optimizer._optimizer_step_pre_hooks


def step_hooks(optimizer: Optimizer) -> tuple[MutableMapping[int, Any], MutableMapping[int, Any]]:
    """What runs before each step, and what runs after it."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def inside_of_compiled(model: Module) -> Module | None:
    """The module inside of what ``torch.compile`` has returned; None for another module."""
    compiler: ModuleType | Any = sys.modules.get("torch._dynamo.eval_frame")  # imported by torch.compile
    if compiler is None or not isinstance(model, compiler.OptimizedModule):
        return None
    inside: Module = model._orig_mod
    return inside


# --- marks for the tracer of torch.compile -----------------------------------------------------------

_SKIP = eval_frame._FrameAction.SKIP
# Neither the frame nor what it calls: between two graphs the tracer looks at each frame by itself.
_SKIP_ALL = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_MARKS = {"_torchdynamo_disable", "_torchdynamo_inline", "_dynamo_marked_constant"}


def run_without_compiler(code: CodeType) -> None:
    """Where the tracer meets a frame of ``code``, it leaves that and all that it calls alone."""
    eval_frame.set_code_exec_strategy(code, _SKIP_ALL)


def mark_as_untraced(function: Any, message: str) -> None:
    """As ``torch.compiler.disable``: a call is a graph break, for which ``message`` is the reason."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = message


def mark_replacement(function: Any, replacement: Callable[..., Any]) -> None:
    """As ``torch.compiler.substitute_in_graph``: the tracer follows ``replacement``."""
    function._torchdynamo_inline = replacement


def mark_as_constant(function: Any) -> None:
    """As ``torch.compiler.assume_constant_result``: the tracer takes the result for a constant."""
    function._dynamo_marked_constant = True


def has_mark_of_compiler(function: FunctionType) -> bool:
    """True if one of the marks above is on ``function``."""
    return not _MARKS.isdisjoint(vars(function))
