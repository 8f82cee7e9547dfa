"""Lists of ranks as text."""

from __future__ import annotations

from collections.abc import Sequence


def key_of_ranks(ranks: Sequence[int]) -> str:
    """A key for the groups that have ``ranks``."""
    return ",".join(map(str, ranks))


def describe_ranks(ranks: Sequence[int]) -> str:
    """``"rank 3"``, or ``"ranks 0-2, 5"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def describe_by_rank(ranks: Sequence[int], texts: Sequence[str]) -> str:
    """``"rank 0: one; ranks 1-2: another"``, from a text of each rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{describe_ranks(members)}: {text}" for text, members in ranks_of.items())


def ranges(ranks: Sequence[int]) -> str:
    """``"3"``, or ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
