"""Notice parameters that should be equal on all ranks and are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Module

from ignite_dist.collectives.coordination import same_outcome
from ignite_dist.comp_models import ComputationModel
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.training.comparisons import trained_together
from ignite_dist.training.samples import describe_difference, digest_of, is_whole, taken_from
from ignite_dist.training.wrapped_models import unwrap_model

_Ranks = tuple[int, ...]


class Samples:
    """Some values of the parameters that the ranks of a group train together.

    Args:
        live: the context.
        models: the models by name, or modules that contain models of ``auto_model``.

    Attributes:
        digests: one for the ranks of each group. They can be sent.
    """

    def __init__(self, live: ComputationModel, models: Mapping[str, Module]) -> None:
        self._by_group: dict[_Ranks, dict[str, bytes]] = {}
        for prefix, model in models.items():
            names = {
                id(one): f"{prefix}.{name}" if prefix else name
                for name, one in unwrap_model(model).named_parameters()
            }
            for group, parameters in trained_together(live, model):
                named = {names[id(one)]: one for one in parameters if id(one) in names and is_whole(one)}
                self._by_group.setdefault(group.ranks, {}).update(taken_from(named))
        self.digests = {
            ranks: digest_of(b"".join(values.values())) for ranks, values in self._by_group.items()
        }

    def warn_if_different(
        self, live: ComputationModel, function: str, digests_by_rank: Sequence[dict[_Ranks, str]]
    ) -> None:
        """Warn on rank 0, with the name of the first parameter that differs. Every rank calls this."""
        if not any(
            _difference(digests_by_rank, "", ranks, ranks) for row in digests_by_rank for ranks in row
        ):
            return
        names = {
            (ranks, name): digest_of(value)
            for ranks, values in self._by_group.items()
            for name, value in values.items()
        }
        rows = same_outcome(live, lambda: names, function)
        found = (_difference(rows, key[1], key[0], key) for row in rows for key in row)
        difference = next(filter(None, found), "")
        text = f"{difference} {function} saves those of rank 0. {_CAUSES}" if difference else ""
        # Every rank waits for rank 0, where a filter may make an error of the warning.
        same_outcome(live, lambda: warn_user(text) if text and live.get_rank() == 0 else None, function)


def _difference(rows: Sequence[Mapping[Any, str]], name: str, ranks: _Ranks, key: Any) -> str:
    """See :func:`describe_difference`: of those among ``ranks`` that have the key."""
    return describe_difference(name, {rank: rows[rank][key] for rank in ranks if key in rows[rank]})


_CAUSES = (
    "Usual causes are a step, a learning rate or a clipping that depends on a value of each rank, and other "
    "hardware. In local SGD, save after idist.average_parameters."
)
