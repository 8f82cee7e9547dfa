"""``print`` and ``progress_bar``: output of one rank, on every model."""

from __future__ import annotations

import io
import sys

import pytest

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


@on_every_rank
def test_rank_0_prints() -> None:
    rank, file = idist.get_rank(), io.StringIO()
    with count_collectives() as counted:
        idist.print("loss", 0.5, rank, sep="-", end="!\n", file=file, flush=True)
        idist.print(file=file)
    assert counted.count == 0
    assert file.getvalue() == ("loss-0.5-0!\n\n" if rank == 0 else "")


@on_every_rank
def test_one_rank_per_node_prints() -> None:
    local_rank, file = idist.get_local_rank(), io.StringIO()  # known from here on, on every model
    with count_collectives() as counted:
        idist.print("é", file=file, local=True)
    assert counted.count == 0
    assert file.getvalue() == ("é\n" if local_rank == 0 else "")


@on_every_rank
def test_one_rank_alone_may_print() -> None:
    """No other rank is waited for."""
    if idist.get_rank() == 0:
        file = io.StringIO()
        idist.print("alone", file=file)
        assert file.getvalue() == "alone\n"
    assert idist.all_reduce(1) == idist.get_world_size()


@on_every_rank
def test_an_unknown_keyword_is_refused_on_every_rank() -> None:
    with raises(TypeError, "Did you mean 'sep'?"):
        idist.print("text", seps=" ")
    with raises(TypeError, "Did you mean 'desc'?"):
        idist.progress_bar([1], dsc="epoch")
    with raises(TypeError, "progress_bar takes an iterable"):
        idist.progress_bar(3)  # type: ignore[arg-type]


@on_every_rank
def test_a_bar_on_rank_0_and_the_same_items_on_every_rank() -> None:
    rank, file = idist.get_rank(), io.StringIO()
    with count_collectives() as counted:
        bar = idist.progress_bar([rank, "b", None], desc="epoch 1", file=file)
        assert len(bar) == 3
        items = []
        for item in bar:
            bar.set_postfix(loss=0.5)
            items.append(item)
    assert counted.count == 0
    assert items == [rank, "b", None]
    if rank == 0:
        assert "epoch 1" in file.getvalue() and "3/3" in file.getvalue()
    else:
        assert file.getvalue() == ""


@on_every_rank
def test_a_bar_of_a_loader_and_of_an_iterator() -> None:
    file = io.StringIO()
    loader = idist.auto_dataloader(list(range(12)), batch_size=2 * idist.get_world_size(), shuffle=False)
    bar = idist.progress_bar(loader, file=file)
    assert len(bar) == len(loader) == -(-12 // (2 * idist.get_world_size()))
    assert sum(len(batch) for batch in bar) == 12 // idist.get_world_size()
    assert list(idist.progress_bar(iter("abc"), file=file)) == [*"abc"]
    hidden = io.StringIO()
    assert list(idist.progress_bar(range(3), file=hidden, disable=True)) == [0, 1, 2]
    assert hidden.getvalue() == ""


@on_every_rank
def test_without_tqdm_the_error_says_what_to_install() -> None:
    if current_model().ranks_in_process() > 1:  # the modules of a process are its ranks' in common
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "tqdm", None)
        with raises(ModuleNotFoundError, "pip install tqdm"):
            idist.progress_bar([1])
