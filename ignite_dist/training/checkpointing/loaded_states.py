"""The states of a checkpoint, loaded into models and optimizers that may be sharded in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import same_outcome
from ignite_dist.comp_models import ComputationModel
from ignite_dist.training.checkpointing.files import shards_folder
from ignite_dist.training.checkpointing.trees import fill_marks, names_of_shards
from ignite_dist.training.state_dicts import (
    as_sharded,
    fill_model,
    fill_sharded_model,
    has_shards,
    load_optimizer_state,
)
from ignite_dist.training.unwrapped_states import as_unwrapped_state, name_reader, unwrapped_state
from ignite_dist.values import safe_objects
from ignite_dist.values.gradients import parameters_of


class LoadedStates:
    """The states of a checkpoint that rank 0 has read. Every rank calls each method.

    A whole state is sent by rank 0. Sharded tensors are read by every rank if they go into sharded tensors,
    and by rank 0 if they go into whole ones.

    Args:
        live: the context.
        path: the checkpoint.
        content: its content on rank 0, and an empty dict on the other ranks.

    Raises:
        ValueError: the folder of sharded tensors is torn; raised on every rank.
    """

    def __init__(self, live: ComputationModel, path: Path, content: dict[str, Any]) -> None:
        self._live = live
        self._content = content
        header = None
        if content.get("shards"):
            model = content["model"] or {}
            are_shards = {name: bool(names_of_shards(value)) for name, value in model.items()}
            header = content["number"], are_shards, content["optimizer"]
        self._header = share(live, header)
        if self._header is not None:
            self._folder = shards_folder(path, self._header[0])
            if path.is_symlink() and not self._folder.exists():
                self._folder = shards_folder(path.resolve(), self._header[0])

    def check(self, *parts: Module | Optimizer | None) -> None:
        """Raise if a rank that has to read sharded tensors for ``parts`` cannot.

        Raises:
            ValueError: their folder or a file is missing or too short, or holds other data.
        """
        if self._header is None:
            return
        from ignite_dist.training.checkpointing import shard_files

        tensors = {**names_of_shards(self._content.get("model")), **names_of_shards(self._header[2])}
        reads = self._live.get_rank() == 0 or any(map(has_shards, parts))
        same_outcome(
            self._live,
            lambda: shard_files.check(self._folder, tensors) if reads else None,
            "load_checkpoint",
        )

    def load_model(self, model: Module) -> None:
        """Fill the model, which fits."""
        if self._header is None or not has_shards(model):
            fill_model(model, self._whole("model"))
            return
        from ignite_dist.training.checkpointing import shard_files

        are_shards = self._header[1]
        read, own = name_reader(model, are_shards), unwrapped_state(model)
        shards = {name: read(name) for name, is_shard in are_shards.items() if is_shard}
        shard_files.read_into(self._folder, {f"model.{name}": own[short] for name, short in shards.items()})
        whole = as_unwrapped_state(model, self._content.get("model") or {})
        fill_sharded_model(model, whole, shards.values())

    def load_optimizer(self, optimizer: Optimizer, name: str = "") -> None:
        """Fill the optimizer, which fits; ``name`` is its name among several."""
        if self._header is None or not has_shards(optimizer):
            load_optimizer_state(optimizer, self._whole("optimizer", name))
            return
        from ignite_dist.training.checkpointing import shard_files

        state, tensors = self._header[2][name] if name else self._header[2], {}
        for number, parameter in enumerate(parameters_of(optimizer)):

            def allocate(name: str, like: Tensor, parameter: Tensor = parameter) -> Tensor:
                tensors[name] = _allocate(like, parameter)
                return tensors[name]

            values = fill_marks(state["state"].get(number, {}), allocate)
            if is_sharded(parameter):  # perhaps it was whole when it was saved
                values = {name: as_sharded(value, parameter) for name, value in values.items()}
            if values:
                state["state"][number] = values
        shard_files.read_into(self._folder, tensors)
        optimizer.load_state_dict(state)

    def _whole(self, part: str, name: str = "") -> Any:
        """The whole state on rank 0, which reads sharded tensors alone."""
        content = self._content.get(part)
        content = content[name] if content and name else content
        if self._header is None:
            return content
        from ignite_dist.training.checkpointing import shard_files

        tensors: dict[str, Tensor] = {}

        def allocate(name: str, like: Tensor) -> Tensor:
            tensors[name] = torch.empty_like(like, device="cpu")
            return tensors[name]

        def read() -> Any:
            state = fill_marks(content, allocate)
            if tensors:
                shard_files.read_into(self._folder, tensors, alone=True)
            return state

        found: list[Any] = []
        same_outcome(self._live, lambda: found.append(read()), "load_checkpoint")
        return found[0]


def share(live: ComputationModel, value: Any) -> Any:
    """The ``value`` of rank 0, a part of a checkpoint: pickle would refuse some of its dtypes."""
    is_rank_0 = live.get_rank() == 0
    if live.get_world_size() == 1:
        return value
    saved = safe_objects.save(value) if is_rank_0 else b""
    received = live.objects.broadcast_bytes(saved, 0, live.groups.resolve(None))
    return value if is_rank_0 else safe_objects.load(received, 0)


def _allocate(like: Tensor, parameter: Tensor) -> Tensor:
    """A tensor like ``like``, sharded like ``parameter`` if both have the same shape."""
    if is_sharded(parameter) and like.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=like.dtype)
    return torch.empty_like(like, device=parameter.device)
