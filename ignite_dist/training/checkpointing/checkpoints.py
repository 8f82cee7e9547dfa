"""Checkpoints of a training run: written whole or not at all, loaded on any number of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.coordination import one_rank_only, same_outcome
from ignite_dist.collectives.interrupts import one_call
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.per_context import PerContext
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.context.live import current_model
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.internals.ranks import describe_by_rank
from ignite_dist.training.checkpointing import files as checkpoint_files
from ignite_dist.training.checkpointing.loaded_states import LoadedStates, share
from ignite_dist.training.checkpointing.parts import (
    Part,
    check_fits,
    load_state,
    names_of_several,
    own_states,
    parts_of,
    state_of,
)
from ignite_dist.training.checkpointing.pending_saves import PendingSave, wait_for_pending
from ignite_dist.training.checkpointing.rank_states import gather_on_rank_0, own_state, restore
from ignite_dist.training.checkpointing.trees import plain, split_shards
from ignite_dist.training.comparisons import check_same_state
from ignite_dist.training.drift import Samples
from ignite_dist.training.state_dicts import has_shards
from ignite_dist.training.unwrapped_states import unwrapped_state
from ignite_dist.values.copies import Copies

_Part = TypeVar("_Part")
Several = Mapping[str, _Part] | list[_Part] | tuple[_Part, ...]


@one_call
def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Module | Several[Module] | None = None,
    optimizer: Optimizer | Several[Optimizer] | None = None,
    scheduler: Any = None,
    loader: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
    **values: Any,
) -> Work:
    """Save a training run into the file ``path``, whole or not at all. Every rank calls this.

    A kill at any moment leaves the previous file of this name, or none. The file also has the random states
    of each rank: torch's (CPU and device), Python's and numpy's. Rank 0 writes the file.
    ``torch.load(path, weights_only=True)`` reads it without this package: a dict with "model", "optimizer",
    "scheduler" and "values". Some values of
    each whole parameter are compared: rank 0 warns if ranks that train together have others.

    Sharded tensors (``DTensor``: FSDP2, tensor parallel) are in a folder beside the file,
    ``<path>.shards-<number>``. All ranks write them with ``torch.distributed.checkpoint``, into the same file
    system. Move, copy or rename the folder together with the file: its name begins with the file's.

    Args:
        path: the file. Missing folders are made.
        model: the result of :func:`auto_model`, or a module that contains such models. Several models are a
            dict of names, in any order, or a list; so are several optimizers, schedulers and loaders. Older
            packages refuse a file with several optimizers, schedulers or loaders.
        optimizer: the result of :func:`auto_optim`.
        scheduler: any object with ``state_dict()`` and ``load_state_dict()``; that of rank 0 is saved.
        loader: the result of :func:`auto_dataloader`, for the epoch of its sampler and the position in it:
            the batches that the loop has received, not those that workers have fetched ahead; also after the
            loop was left by ``break`` or an exception. All ranks must have received equally many. With
            :func:`accumulate_gradients` save after a step, when ``is_final`` is True: gradients are not
            saved. Rank 0 warns in the middle of a step.
        keep: after a successful save, delete older checkpoints in the folder of ``path``, so that this one
            and the ``keep - 1`` before it are left. All checkpoints in the folder count, also those of other
            names and of other jobs; symbolic links do not. Other files stay.
        asynchronous: True copies the states to the CPU, and writes them in a thread while training goes on.
            The next save, the next load and the end of the context wait for the write.
        values: anything else, of rank 0: tensors, numbers, strings, None, and dicts, lists and tuples of
            these; or an object with ``state_dict()`` (a ``GradScaler``, averaged weights), whose state is
            saved. :func:`load_checkpoint` fills it if it gets it under the same name. Pass a model with
            sharded tensors in ``model``.

    Returns:
        A :class:`Work`, which is complete unless ``asynchronous``. Its ``wait()`` returns the path, or raises
        the error of the write. Every rank calls ``wait()``, or none: a rank that waits alone waits for ever.

    Raises:
        TypeError: a value, or an object in ``model``, ``optimizer``, ``scheduler`` or ``loader``, is of
            another type; or a name is not a str.
        ValueError: ``keep`` is less than 1, ``path`` is a folder, the ranks pass different ``path`` or
            ``asynchronous`` or are at different batches, or a name is empty. The name of a model must have no
            dot.
        OSError: the file cannot be written, or the previous asynchronous write has failed. If the disk is
            full, the text has the bytes that are needed and free.
        RuntimeError: the state of an object cannot be taken.
            Every rank raises each of these errors, and the previous file is unchanged.

    Example::

        for epoch in range(first_epoch, num_epochs):
            train_one_epoch(model, loader)
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            idist.save_checkpoint(f"run/{epoch}.pt", **parts, keep=3, epoch=epoch + 1)
    """
    live = current_model()
    live.groups.check_not_joining()
    wait_for_pending(live)
    given, path = Path(path), Path(os.path.abspath(path))  # a thread may write after os.chdir
    parts = parts_of(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    content: dict[str, Any] = {}
    copies = Copies(of_cpu=asynchronous)
    samples: list[Samples] = []
    of_this_rank: dict[str, Any] = {}

    def prepare() -> dict[str, Any]:
        _check_target(path, keep)
        for part in parts.values():
            part.check()
        states = {name: one.state_dict() for name, one in parts["scheduler"].objects.items()}
        content["scheduler"] = plain(parts["scheduler"].entry(states), "scheduler", copies.promise)
        content["values"] = {
            name: plain(state_of(name, value), name, copies.promise) for name, value in values.items()
        }
        samples.append(Samples(live, parts["model"].objects))
        if live.get_rank() == 0:
            _warn_of_unfinished_step(parts["loader"])
        of_this_rank.update(own_state(live, parts["loader"]))
        positions = parts["loader"].with_states(of_this_rank["loader"])
        return {
            "number": _prepare_folder(path) if live.get_rank() == 0 else 0,
            "batches": [position["batches"] for _, position in positions],
            "samples": samples[0].digests,
        }

    _check_same_call(live, "save_checkpoint", path=given, asynchronous=bool(asynchronous))
    ranks = same_outcome(live, prepare, "save_checkpoint")
    _check_positions(ranks)
    samples[0].warn_if_different(live, "save_checkpoint", [one["samples"] for one in ranks])
    number = ranks[0]["number"]
    shards = _take_states(live, parts, content, copies)
    folder = checkpoint_files.shards_folder(path, number) if shards else None
    content.update(checkpoint_files.header(number, names_of_several(parts), bool(shards)))
    content.update(gather_on_rank_0(live, of_this_rank))
    if not parts["loader"].is_given:
        content["loader"] = None
    write = _writer(live, path, content, folder, shards, keep, asynchronous)
    if asynchronous:
        return PendingSave(live, given, write)
    same_outcome(live, write, "save_checkpoint")
    return Completed(given)


def _check_target(path: Path, keep: Any) -> None:
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"keep must be a number of checkpoints, at least 1, or None for all; got {keep!r}.")
    if path.is_dir():
        raise ValueError(
            f"path must be a file, and {path} is a folder: save_checkpoint({str(path / 'name.pt')!r})."
        )
    if path.name.endswith(checkpoint_files.TEMPORARY):
        raise ValueError(
            f"path must not end with {checkpoint_files.TEMPORARY}, which marks unfinished files."
        )


def _prepare_folder(path: Path) -> int:
    """Make the folder of ``path``, and return the number of the next checkpoint in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = checkpoint_files.next_number(path.parent)
    # Left behind by a job that was killed before it wrote the file.
    shutil.rmtree(checkpoint_files.shards_folder(path, number), ignore_errors=True)
    return number


def _check_same_call(live: ComputationModel, function: str, **settings: Any) -> None:
    """Raise ``ValueError`` on every rank if they pass other ``settings`` to ``function``. Each calls this."""
    rows = same_outcome(live, lambda: {name: str(value) for name, value in settings.items()}, function)
    for name in settings:
        values = [row[name] for row in rows]
        if len(set(values)) > 1:
            raise ValueError(
                f"{function} needs the same {name} on every rank. Got "
                f"{describe_by_rank(range(len(values)), values)}.{_ADVICE.get(name, '')}"
            )


_ADVICE = {
    "path": " Rank 0 reads and writes for all. If the path depends on the time or the machine, pass "
    "idist.broadcast(path). For a file of each rank use torch.save."
}


def _check_positions(ranks: list[dict[str, Any]]) -> None:
    batches = [one["batches"][0] if len(one["batches"]) == 1 else one["batches"] for one in ranks]
    if any(one != batches[0] for one in batches):
        raise ValueError(
            f"save_checkpoint(loader=...) needs all ranks at the same batch, but they have received "
            f"{batches} batches (in rank order). Call it after the same step on every rank."
        )


def _warn_of_unfinished_step(loader: Part) -> None:
    text = next(filter(None, (one.unfinished_step() for one in loader.objects.values())), "")
    if text:
        warn_user(
            f"save_checkpoint(loader=...) is called after {text} of a step. The checkpoint has the position "
            "behind this microbatch, but not the gradients since the last step: a run that loads it makes "
            "other steps than this one. Save after the step, when sync.is_final."
        )


def _take_states(
    live: ComputationModel, parts: dict[str, Part], content: dict[str, Any], copies: Copies
) -> dict[str, Any]:
    """Put the states of models and optimizers into ``content``, on rank 0. Every rank calls this.

    Returns:
        The sharded tensors by name, in whose place ``content`` has marks.
    """
    model, optimizer = parts["model"].as_module(), parts["optimizer"]
    without_state = set()
    for name, one in optimizer.objects.items():
        if hasattr(one, "consolidate_state_dict"):  # ZeRO: whole on rank 0, after this
            one.consolidate_state_dict(to=0)
            if live.get_rank() != 0:
                without_state.add(name)
    shards: dict[str, Any] = {}

    def take() -> None:
        of_optimizers = {
            name: one.state_dict() for name, one in optimizer.objects.items() if name not in without_state
        }
        states = {
            "model": None if model is None else unwrapped_state(model),
            "optimizer": optimizer.entry(of_optimizers),
        }
        states = {kind: split_shards(state, kind, shards) for kind, state in states.items()}
        if live.get_rank() == 0:
            content.update({kind: plain(state, kind, copies.promise) for kind, state in states.items()})
            copies.make()

    same_outcome(live, take, "save_checkpoint")
    return shards


_groups: PerContext[Any] = PerContext()
"""The group of each context whose collectives write sharded checkpoints in a thread."""


def _writer(
    live: ComputationModel,
    path: Path,
    content: dict[str, Any],
    folder: Path | None,
    shards: dict[str, Any],
    keep: int | None,
    asynchronous: bool,
) -> Callable[[], None]:
    """The function that writes this rank's part. Sharded tensors are copied now if it is called later."""
    rank, write_shards = live.get_rank(), None
    if folder is not None:
        from ignite_dist.training.checkpointing import shard_files

        if asynchronous and _groups.get(live) is None:
            # Not groups.new(): users' lists of all ranks would then select this group.
            _groups[live] = live.transport.make_group(tuple(range(live.get_world_size())), backend="gloo")
        write_shards = shard_files.writer(folder, shards, _groups.get(live) if asynchronous else None)

    def write() -> None:
        try:
            if write_shards is not None:
                write_shards()
            if rank == 0:
                checkpoint_files.write(path, content, folder)
        except Exception:
            if rank == 0 and folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if rank == 0:
            checkpoint_files.delete_old(path, content["number"], keep)

    return write


@one_call
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Module | Several[Module] | None = None,
    optimizer: Optimizer | Several[Optimizer] | None = None,
    scheduler: Any = None,
    loader: Any = None,
    **values: Any,
) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` has saved into the given objects, in place. Every rank calls this.

    The number of ranks, the backend and the strategy (``DistributedDataParallel``, FSDP2, ZeRO, none) may be
    others than those of the save. Rank 0 reads the file, and sends the others what they need; all ranks read
    the folder of sharded tensors, if there is one and the model is sharded. No code of the file runs.

    With ``optimizer`` or ``loader`` the run goes on: each rank gets its random states. If there are more
    ranks than in the checkpoint, the others keep theirs. Without both (a model to evaluate or to fine-tune)
    all random states stay.

    The next pass over ``loader`` goes on with the batch after the saved position, in the order of the saved
    run. ``set_epoch`` with another epoch begins that epoch instead. Random numbers that data loader workers
    draw are not restored.

    Args:
        path: the file; see :func:`latest_checkpoint`.
        model: the result of :func:`auto_model`. None loads no model; this holds for the other objects too.
        optimizer: the result of :func:`auto_optim`.
        scheduler: an object with ``state_dict()`` and ``load_state_dict()``.
        loader: the result of :func:`auto_dataloader`.
        values: such objects, by the names with which they were saved. Other values are only returned.

    Returns:
        The ``values`` of :func:`save_checkpoint`, with tensors on the CPU; for an object, its state.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is torn, not a checkpoint, of a newer version, of another optimizer, data set or
            sampler, its position is behind the end, it lacks one of the objects, or the ranks pass different
            objects or paths.
        RuntimeError: names or shapes of a model differ, also of one in ``values``.
        CollectiveMismatchError: the models of the ranks differ in the names, order, shapes or dtypes of their
            parameters and buffers.
        TypeError: an object is of another type; or a number or another object without a state is in
            ``values``. Every rank raises each of these errors, before anything is changed.
        Exception: the ``load_state_dict()`` of a scheduler or of an object in ``values`` has raised it.
            These are called when the models and optimizers have been loaded. The other ranks raise the same
            error, or a ``RankFailedError`` for one that is no ValueError, TypeError, OSError or RuntimeError.

    Example::

        first_epoch = 0
        if (path := idist.latest_checkpoint("run")) is not None:
            first_epoch = idist.load_checkpoint(path, model=model, optimizer=optimizer)["epoch"]
    """
    live = current_model()
    live.groups.check_not_joining()
    wait_for_pending(live)
    path, content = Path(path), {}
    parts = parts_of(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def read() -> tuple[list[str], list[str]]:
        for part in parts.values():
            part.check()
        value_states = own_states(values)
        if live.get_rank() == 0:
            content.update(checkpoint_files.read(path))
            check_fits(content, parts, values, value_states)
        given = [part.described() for part in parts.values() if part.is_given]
        return [*given, *sorted(values)], [*map(_described_groups, parts["optimizer"].objects.values())]

    _check_same_call(live, "load_checkpoint", path=path)
    for objects in zip(*same_outcome(live, read, "load_checkpoint"), strict=True):
        _check_same_objects(objects)
    module, optimizers = parts["model"].as_module(), parts["optimizer"].objects
    if module is not None:
        check_same_state(live, module, "load_checkpoint")
    states = LoadedStates(live, path, content)
    states.check(module, *optimizers.values())
    received = share(live, {name: content[name] for name in _RECEIVED} if content else {})
    if module is not None:
        states.load_model(module)
    for name, one in optimizers.items():
        states.load_optimizer(one, name)

    def fill() -> None:
        for one, state in parts["scheduler"].with_states(received["scheduler"]):
            one.load_state_dict(state)
        for name, value in values.items():
            load_state(value, received["values"][name])

    same_outcome(live, fill, "load_checkpoint")
    goes_on = parts["optimizer"].is_given or parts["loader"].is_given
    restore(live, content, parts["loader"], with_random_states=goes_on)
    found: dict[str, Any] = received["values"]
    return found


_RECEIVED = ("scheduler", "values")


def _described_groups(optimizer: Optimizer) -> str:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return f"an optimizer with groups of {sizes} parameters{' with shards' * has_shards(optimizer)}"


def _check_same_objects(objects: Sequence[list[str]]) -> None:
    if any(one != objects[0] for one in objects):
        by_rank = describe_by_rank(range(len(objects)), [", ".join(one) or "nothing" for one in objects])
        raise ValueError(f"load_checkpoint needs the same objects on every rank, but got {by_rank}.")


@one_call
def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in ``folder`` that :func:`save_checkpoint` wrote last; None if there is none.

    Every rank calls this. Rank 0 looks, so all ranks get the same path. The order is that of the saves, which
    each file holds, not that of times or names. Torn files and symbolic links are not returned.

    Args:
        folder: a folder, which need not exist.

    Raises:
        ValueError: the ranks pass different folders; raised on every rank.
        OSError: rank 0 cannot read the folder; raised on rank 0.
        RankFailedError: this happened; raised on the other ranks.
    """
    live = current_model()
    wait_for_pending(live)
    folder = Path(folder)
    _check_same_call(live, "latest_checkpoint", path=folder)
    found: str | None = _latest(folder)
    return None if found is None else Path(found)


@one_rank_only(broadcast=True)
def _latest(folder: Path) -> str | None:
    for path, shards in checkpoint_files.newest_first(folder):
        if shards is None:
            return str(path)
        from ignite_dist.training.checkpointing import shard_files

        with suppress(ValueError):
            shard_files.check(shards, {})
            return str(path)
    return None
