"""What each rank has of its own in a checkpoint: the positions of its loaders, and its random states.

Rank 0 writes and reads the file. It gathers the states of all ranks, and sends each rank its own: no other
rank gets them all.
"""

from __future__ import annotations

from typing import Any

from ignite_dist.collectives.messages import NOTHING, begin_messages, encode
from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import ComputationModel
from ignite_dist.training.checkpointing.parts import Part
from ignite_dist.values import safe_objects
from ignite_dist.values.random_states import RandomStates


def own_state(live: ComputationModel, loader: Part) -> dict[str, Any]:
    """The state of this rank. Never communicates."""
    return {
        "loader": loader.entry({name: one.position() for name, one in loader.objects.items()}),
        "random_states": {**RandomStates.now().plain(), "device": live.training.random_state()},
    }


def gather_on_rank_0(live: ComputationModel, state: dict[str, Any]) -> dict[str, list[Any]]:
    """The states of all ranks in their order, by name. Empty on other ranks than 0. Every rank calls this."""
    states = [state]
    if live.get_world_size() > 1:
        states = _exchange(live, "save_checkpoint", {0: state})
    return {name: [one[name] for one in states if one is not NOTHING] for name in state}


def restore(live: ComputationModel, content: dict[str, Any], loader: Part, with_random_states: bool) -> None:
    """Restore what this rank has in the ``content`` that rank 0 has read. Every rank calls this.

    Args:
        live: the context.
        content: the content; empty on other ranks.
        loader: the loaders, which go on.
        with_random_states: True restores the random states too.
    """
    num_ranks = live.get_world_size()
    sent = {rank: _state_for(rank, num_ranks, content) for rank in range(num_ranks) if content}
    if num_ranks > 1:
        saved = {rank: safe_objects.save(state) for rank, state in sent.items()}
        received = safe_objects.load(_exchange(live, "load_checkpoint", saved)[0], 0)
    else:
        received = sent[0]
    for one, position in loader.with_states(received["loader"]):
        one.resume(position, received["is_same_rank"])
    states = received["random_states"] if with_random_states else None
    if states is not None:
        RandomStates.of_plain(states).restore()
        live.training.set_random_state(states["device"])


def _state_for(rank: int, num_ranks: int, content: dict[str, Any]) -> dict[str, Any]:
    random_states, positions = content["random_states"], content["loader"]
    is_same_rank = len(random_states) == num_ranks
    return {
        "loader": None if positions is None else positions[rank if is_same_rank else 0],
        "random_states": random_states[rank] if rank < len(random_states) else None,
        "is_same_rank": is_same_rank,
    }


def _exchange(live: ComputationModel, function: str, sent: dict[int, Any]) -> list[Any]:
    """What each rank has sent to this one, in the public function ``function``; see :data:`NOTHING`."""
    world = live.groups.resolve(None)
    messages = [encode(live, function, sent.get(rank, NOTHING)) for rank in world.ranks]
    found: list[Any] = perform(
        live, function, world, lambda group: begin_messages(live, messages, group), outside=None
    )
    return found
