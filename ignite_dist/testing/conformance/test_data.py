"""Shares of data, and the results for all of it in its order, on every model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

import ignite_dist as idist
from ignite_dist import CollectiveMismatchError
from ignite_dist.testing.conformance.cases import on_every_rank, raises


class Result(NamedTuple):
    scores: Any
    names: Any


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def exact_loader(size: int, batch_size: int = 1, shuffle: bool = False, exact: bool | str = True) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch sizes that do not divide
        return idist.auto_dataloader(list(range(size)), batch_size=batch_size, shuffle=shuffle, exact=exact)


def one_pass(loader: Any) -> torch.Tensor | None:
    batches = list(loader)
    return torch.cat(batches) if batches else None


def sizes() -> range | tuple[int, ...]:
    # XLA compiles for each size.
    return (0, 1, 2, 5, 7) if idist.model_name() == "xla-dist" else range(51)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@on_every_rank
def test_every_sample_exactly_once_in_the_order_of_the_data_set(batch_size: int, shuffle: bool) -> None:
    for size in sizes():
        loader = exact_loader(size, batch_size, shuffle)
        drawn = one_pass(loader)
        gathered = idist.gather_in_order(drawn, loader)
        if size:
            assert gathered.tolist() == list(range(size))
            # A loader of XLA moves its batches; others leave that to the script.
            where = "xla" if idist.model_name() == "xla-dist" else "cpu"
            assert gathered.device.type == where and gathered.dtype is torch.int64
        else:
            assert gathered is None


@pytest.mark.parametrize("shuffle", [False, True])
@on_every_rank
def test_padded_shares_are_of_one_size_and_nothing_of_it_is_left(shuffle: bool) -> None:
    for size in sizes():
        loader = exact_loader(size, 3, shuffle, "padded")
        drawn = one_pass(loader)
        assert (
            idist.all_gather(0 if drawn is None else len(drawn))
            == [-(-size // idist.get_world_size())] * idist.get_world_size()
        )
        names = [] if drawn is None else [str(number) for number in drawn.tolist()]
        gathered = idist.gather_in_order((drawn, names), loader)
        if size:
            assert gathered[0].tolist() == list(range(size))
            assert gathered[1] == [str(number) for number in range(size)]


@pytest.mark.parametrize("size", [0, 1, 7])
@on_every_rank
def test_one_rank_alone_holds_a_tree_with_arrays(size: int) -> None:
    last = idist.get_world_size() - 1
    loader = exact_loader(size, 2, shuffle=True)
    drawn = one_pass(loader)
    values = None
    if drawn is not None:
        names = [str(number) for number in drawn.tolist()]
        array = drawn.cpu().numpy().astype("float64")
        values = {"rows": drawn, "names": names, "array": array[:, None]}
    for dst in (None, last):
        gathered = idist.gather_in_order(values, loader, dst=dst)
        if size == 0 or (dst is not None and idist.get_rank() != dst):
            assert gathered is None
            continue
        assert gathered["rows"].tolist() == list(range(size))
        assert gathered["names"] == [str(number) for number in range(size)]
        assert type(gathered["array"]).__module__ == "numpy"
        assert gathered["array"].tolist() == [[float(number)] for number in range(size)]
    with raises(ValueError, "dst must be a global rank"):
        idist.gather_in_order(values, loader, dst=idist.get_world_size())


@on_every_rank
def test_different_dst_raise_on_every_rank() -> None:
    numpy = pytest.importorskip("numpy")
    rank, size = idist.get_rank(), idist.get_world_size()
    loader = exact_loader(7)
    drawn = one_pass(loader)
    for dst in (rank, 0 if rank == 0 else None, 0 if rank == 0 else size, 0 if rank == 0 else "0"):
        if size > 1:
            with raises(ValueError, "pass different dst: rank 0: 0, rank 1: "):
                idist.gather_in_order(drawn, loader, dst=dst)  # type: ignore[arg-type]
    gathered = idist.gather_in_order(drawn, loader, dst=numpy.int64(0))
    assert (gathered is None) if rank else (gathered.tolist() == list(range(7)))


@on_every_rank
def test_arrays_of_any_layout_in_order() -> None:
    numpy = pytest.importorskip("numpy")
    size, rank, last = 9, idist.get_rank(), idist.get_world_size() - 1
    loader = exact_loader(size, 2, shuffle=True)
    own = one_pass(loader).cpu().numpy()  # type: ignore[union-attr]
    read_only = own.astype("f8")
    read_only.flags.writeable = False
    layouts = [own.astype("f8"), own.astype(">f8"), own.astype("f8")[::-1].copy()[::-1], read_only]
    for number in range(len(layouts)):
        for dst in (None, last):
            gathered = idist.gather_in_order(layouts[number if rank == 0 else 0], loader, dst=dst)
            if dst in (None, rank):
                assert gathered.dtype == "f8" and gathered.tolist() == list(range(size))
    for dtype in (object, "U3", *(["g"] if numpy.dtype("g").itemsize > 8 else [])):
        with raises(TypeError, "rank 0 passed a 1-d array of"):
            idist.gather_in_order(own.astype(dtype if rank == 0 else "f8"), loader)


@on_every_rank
def test_conjugated_and_negated_tensors_in_order() -> None:
    loader = exact_loader(9, 2, shuffle=True)
    own = one_pass(loader).cpu().double()  # type: ignore[union-attr]
    conjugated = torch.complex(own, own).conj()
    wanted = torch.arange(9).double()
    for dst in (None, 0):
        gathered = idist.gather_in_order((conjugated, conjugated.imag), loader, dst=dst)
        if dst in (None, idist.get_rank()):
            assert gathered[0].equal(torch.complex(wanted, -wanted)) and gathered[1].equal(-wanted)


@on_every_rank
def test_the_order_is_that_of_the_pass_that_was_begun_last() -> None:
    loader = exact_loader(13, shuffle=True)
    orders = set()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        drawn = one_pass(loader)
        loader.sampler.set_epoch(99)  # of the next pass
        orders.add(tuple(drawn.tolist()) if drawn is not None else ())
        assert idist.gather_in_order(drawn, loader).tolist() == list(range(13))
    assert len(orders) > 1
    loader.sampler.set_epoch(0)
    assert idist.gather_in_order(one_pass(loader), loader).tolist() == list(range(13))


@on_every_rank
def test_passes_that_were_broken_off_leave_no_trace() -> None:
    loader = exact_loader(5, shuffle=True)
    for _ in range(2):
        for _batch in loader:
            break
        assert idist.gather_in_order(one_pass(loader), loader).tolist() == list(range(5))


@on_every_rank
def test_ranks_that_mean_different_passes_are_told_so() -> None:
    if idist.get_world_size() == 1:
        return
    loader = exact_loader(5, shuffle=True)
    loader.sampler.set_epoch(idist.get_rank())
    drawn = one_pass(loader)
    with raises(ValueError, "samplers of the ranks differ"):
        idist.gather_in_order(drawn, loader)


@on_every_rank
def test_trees_of_tensors_and_of_anything() -> None:
    for size in (1, 5):
        loader = exact_loader(size, batch_size=2, shuffle=True)
        drawn = one_pass(loader)
        values: Any = "nothing here"
        if drawn is not None:
            rows = torch.stack([drawn.double(), drawn.double() / 3], 1).requires_grad_()
            names = [f"é{number}" * 200 for number in drawn.tolist()]
            values = {"result": Result(rows, names), "pair": (drawn % 2 == 0, drawn.to(torch.bfloat16))}
        gathered = idist.gather_in_order(values, loader)
        wanted = torch.arange(size)
        assert type(gathered["result"]) is Result
        scores = gathered["result"].scores
        assert not scores.requires_grad and scores.cpu().equal(
            torch.stack([wanted.double(), wanted.double() / 3], 1)
        )
        assert gathered["result"].names == [f"é{number}" * 200 for number in range(size)]
        assert gathered["pair"][0].tolist() == [number % 2 == 0 for number in range(size)]
        assert gathered["pair"][1].dtype is torch.bfloat16 and gathered["pair"][1].tolist() == list(
            range(size)
        )


@on_every_rank
def test_values_that_are_not_as_many_as_the_samples_raise_on_every_rank() -> None:
    loader = exact_loader(7, batch_size=3)
    drawn = one_pass(loader)
    mine = len(loader.sampler)
    missing = drawn[:-1] if idist.get_rank() == 0 and drawn is not None else drawn
    with raises(ValueError, f"Rank 0 drew {-(-7 // idist.get_world_size())} samples") as caught:
        idist.gather_in_order(missing, loader)
    assert "torch.cat(batches)" in str(caught.value)
    with raises(ValueError, "Rank 0 drew"):
        idist.gather_in_order([*range(mine), 0], loader)
    with raises(TypeError, "passed a int"):
        idist.gather_in_order((drawn, 3), loader)
    with raises(TypeError, "passed a 0-d tensor"):
        idist.gather_in_order(torch.tensor(3, device=idist.device()), loader)
    assert idist.gather_in_order(drawn, loader).tolist() == list(range(7))  # and nobody is out of step


@on_every_rank
def test_values_of_different_kinds_raise_on_every_rank() -> None:
    if idist.get_world_size() == 1:
        return
    loader = exact_loader(8, batch_size=8)
    drawn = one_pass(loader)
    assert drawn is not None
    odd = idist.get_rank() == 1
    for values in (
        drawn.float() if odd else drawn,
        drawn[:, None] if odd else drawn,
        drawn.tolist() if odd else drawn,
        {"a": drawn} if odd else (drawn,),
    ):
        with raises(CollectiveMismatchError, "rank 1"):
            idist.gather_in_order(values, loader)


@on_every_rank
def test_a_loader_that_does_not_know_its_order_is_refused() -> None:
    with raises(ValueError, "exact=True"):
        idist.gather_in_order([1], idist.auto_dataloader([1, 2, 3]))
    with raises(ValueError, "exact=True"):
        idist.gather_in_order([1], [1])
    size = idist.get_world_size()
    others = DataLoader([1, 2], sampler=idist.ExactSampler([1, 2], num_replicas=size + 1, rank=size))
    with raises(ValueError, f"rank {size} of {size + 1}"):
        idist.gather_in_order([], others)


@on_every_rank
def test_what_an_exact_loader_cannot_be_made_of() -> None:
    for name, value in {"sampler": SequentialSampler([1]), "drop_last": True, "batch_sampler": [[0]]}.items():
        with raises(ValueError, name):
            idist.auto_dataloader([1, 2, 3], exact=True, **{name: value})
    with raises(ValueError, "IterableDataset"):
        idist.auto_dataloader(Stream(3), exact=True)
    for wrong in ("paded", "always"):
        with raises(ValueError, "'padded'"):
            idist.auto_dataloader([1, 2, 3], exact=wrong)
    with raises(ValueError, "shard=True needs an IterableDataset"):
        idist.auto_dataloader([1, 2, 3], shard=True)


@on_every_rank
def test_each_rank_takes_its_share_of_a_stream() -> None:
    for size in (0, 1, 2, 7):
        loader = idist.auto_dataloader(Stream(size), batch_size=None, shard=True)
        mine = [int(item) for item in loader]
        assert mine == list(range(size))[idist.get_rank() :: idist.get_world_size()]
        assert sorted(chain(*idist.all_gather(mine))) == list(range(size))


@on_every_rank
def test_split_is_a_contiguous_share() -> None:
    for size in (0, 1, 2, 7, 12):
        parts = idist.all_gather(idist.split_by_rank(list(range(size))))
        assert list(chain(*parts)) == list(range(size))
        lengths = [len(part) for part in parts]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert idist.split_by_rank(torch.arange(12)).tolist() == idist.split_by_rank(list(range(12)))
    assert idist.split_by_rank("x" * 12) == "x" * (12 // idist.get_world_size())
    for bad in ({1, 2}, iter([1]), {"a": 1}, 3):
        with raises(TypeError, "with a length and slices"):
            idist.split_by_rank(bad)


@on_every_rank
def test_a_sampler_of_ones_own() -> None:
    assert idist.sampler_kwargs() == {"num_replicas": idist.get_world_size(), "rank": idist.get_rank()}
    sampler = idist.ExactSampler(range(5), **idist.sampler_kwargs())
    assert sorted(chain(*idist.all_gather(list(sampler)))) == list(range(5))


@pytest.mark.parametrize("exact", [True, "padded"])
@on_every_rank
def test_values_of_every_dtype_come_in_order(exact: bool | str) -> None:
    wide = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int32, torch.int64)
    narrow = (
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.bool,
        torch.complex32,
    )
    unsigned = (torch.uint16, torch.uint32, torch.uint64)
    float8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    is_xla = idist.model_name() == "xla-dist"
    loader = exact_loader(5, batch_size=2, shuffle=True, exact=exact)
    drawn = one_pass(loader)
    for dtype in (*wide, *narrow, *unsigned, *float8):
        if is_xla and dtype in (torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            continue  # which torch_xla has not
        for columns in (1, 3):
            values: Any = None
            if drawn is not None:
                rows = (
                    drawn.cpu()[:, None].repeat(1, columns) % 2
                    if dtype is torch.bool
                    else drawn.cpu()[:, None]
                )
                values = rows.expand(-1, columns).to(dtype).squeeze(1)
                values = values if is_xla and dtype.is_complex else values.to(idist.device())
            gathered = idist.gather_in_order({"a": values} if drawn is not None else None, loader)["a"]
            wanted = torch.arange(5)[:, None].expand(-1, columns)
            wanted = (wanted % 2 if dtype is torch.bool else wanted).to(dtype).squeeze(1)
            assert gathered.dtype is dtype and gathered.shape == wanted.shape
            same = gathered.cpu().view(torch.uint8), wanted.contiguous().view(torch.uint8)
            assert same[0].equal(same[1]), dtype


@on_every_rank
def test_what_a_rank_without_a_sample_gives_is_not_looked_at() -> None:
    loader = exact_loader(1)
    drawn = one_pass(loader)
    values = {"a": drawn} if drawn is not None else {None: object(), 1.5: 2}
    assert idist.gather_in_order(values, loader)["a"].tolist() == [0]


@on_every_rank
def test_with_drop_last_ranks_draw_equally_many_and_nothing_twice() -> None:
    data = list(range(4 * idist.get_world_size() + 3))
    for kwargs in ({}, {"sampler": SequentialSampler(data)}, {"shuffle": False}):
        loader = idist.auto_dataloader(data, batch_size=idist.get_world_size(), drop_last=True, **kwargs)
        shares = idist.all_gather([int(number) for batch in loader for number in batch])
        drawn = list(chain(*shares))
        assert {len(share) for share in shares} == {len(data) // idist.get_world_size()}
        assert len(set(drawn)) == len(drawn)
    size = idist.get_world_size()
    stream = idist.auto_dataloader(Stream(len(data)), batch_size=size, shard=True, drop_last=True)
    shares = idist.all_gather([int(number) for batch in stream for number in batch])
    assert sorted(chain(*shares)) == data[: len(data) // size * size]


@on_every_rank
def test_nothing_to_shuffle_is_an_empty_loader() -> None:
    for kwargs in (
        {"shuffle": True},
        {},
        {"shuffle": True, "drop_last": True},
        {"exact": True, "shuffle": True},
    ):
        assert list(idist.auto_dataloader([], **kwargs)) == []
