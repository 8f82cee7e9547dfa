"""What all ranks that share a data set must agree on: the data, the batches, and the seed of their order."""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from inspect import getattr_static
from itertools import chain, islice
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ignite_dist.collectives.path import perform
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Steps
from ignite_dist.data.passes import Order
from ignite_dist.data.samplers import draw_seed, length_or_none, place_of, with_all_inner
from ignite_dist.data.splitting import Place
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.internals.ranks import describe_by_rank, describe_ranks
from ignite_dist.values import meshes
from ignite_dist.values.random_states import latest_seed
from ignite_dist.values.serialization import as_bytes

# What a checkpoint compares: the rest may change between two runs.
_OF_THE_DATA = ("number of samples", "indices", "sampler", "shuffle")


def _facts_of(dataset: Any, datasets: Sequence[Any], sampler: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the ranks compare, as plain values by name: equal if their loaders draw the same batches."""
    indices, contents = _digests(dataset)
    return {
        "data set": type(dataset).__name__,
        "number of samples": length_or_none(dataset),
        "indices": indices,
        "indices inside of it": _indices_inside(datasets),
        **contents,
        "sampler": None if sampler is None else type(sampler).__name__,
        "draws of the sampler": None if sampler is None else _draws_of(sampler),
        "batch_size": kwargs.get("batch_size", 1),
        "shuffle": bool(kwargs.get("shuffle")),
        "drop_last": bool(kwargs.get("drop_last")),
    }


def batch_sampler_keyword(kwargs: dict[str, Any]) -> str:
    """The keyword of ``DataLoader`` that has a sampler of whole batches; empty if none has."""
    if kwargs.get("batch_sampler") is not None:
        return "batch_sampler"
    is_batched = kwargs.get("batch_size", 1) is not None
    return "sampler" if not is_batched and isinstance(kwargs.get("sampler"), BatchSampler) else ""


def agree_on_order(
    model: ComputationModel,
    group: Any,
    dataset: Any,
    place: Place,
    exact: bool | str,
    seed: int | None,
    kwargs: dict[str, Any],
) -> Order:
    """The order of a loader, equal on all ranks that share the data. Each of them calls this.

    Args:
        model: the model of the context.
        group: the ``group=`` of ``auto_dataloader``.
        dataset: the data set.
        place: this rank among those that share the data.
        exact: the ``exact=`` of ``auto_dataloader``.
        seed: the ``seed=`` of ``auto_dataloader``.
        kwargs: the keywords of ``DataLoader``.

    Raises:
        CollectiveMismatchError: the ranks have different data or settings, or some make another call.
        ValueError: a rank has the sampler of another rank. Raised on every rank.
    """
    sampler = kwargs.get("sampler" if kwargs.get("batch_sampler") is None else "batch_sampler")
    members, found, datasets = _members(model, group), place_of(sampler), _inner_datasets(dataset)
    facts = _facts_of(dataset, datasets, sampler, kwargs)
    is_random = bool(kwargs.get("shuffle")) if sampler is None else type(sampler) is not SequentialSampler
    given = seed
    if seed is None and is_random and found is None:
        generator = kwargs.get("generator")
        # Ranks of other groups draw the same samples, and do not take part here.
        has_all_ranks = members is not None and len(members.ranks) == model.get_world_size()
        seed = draw_seed(sampler, generator) if has_all_ranks or generator is not None else latest_seed()
    fault = "" if found in (None, tuple(place)) else _wrong_place(sampler, found, place)
    if members is not None and len(members.ranks) > 1:
        settings = {"seed": given, "exact": exact, "ranks that share the data": place.num_ranks}
        attributes = _attributes_of(datasets)
        row = {**settings, **facts}, attributes, _words_of(datasets, attributes), seed, fault
        rows = perform(
            model,
            "auto_dataloader",
            members,
            lambda members: Steps(lambda: model.objects.gather(row, members)),
            outside=[row],
        )
        _compare(members, rows)
        _warn_of_attributes(members, [row[1] for row in rows])
        _warn_of_words(members, [row[2] for row in rows])
        seed = rows[0][3]
        faults = [
            f"On rank {rank}: {text}" for rank, (*_, text) in zip(members.ranks, rows, strict=True) if text
        ]
        fault = fault or "".join(faults[:1])
    if fault:
        raise ValueError(fault)
    of_the_data = {name: facts[name] for name in _OF_THE_DATA}
    return Order(seed, num_ranks_of_sampler=None if found is None else found[0], facts=of_the_data)


def _wrong_place(sampler: Any, found: Any, place: Place) -> str:
    return (
        f"The {type(sampler).__name__} was made for rank {found[1]} of {found[0]}, but this is rank "
        f"{place.number} of {place.num_ranks}. Make it with **idist.sampler_kwargs(), or pass a sampler "
        "that draws from the whole data set: the loader splits its draws."
    )


def _members(model: ComputationModel, group: Any) -> Group | None:
    """The ranks that compare; None if ranks that do not share the data would have to make a call too.

    Without ``group`` these are all ranks, in a mesh too: the ranks of a tensor-parallel group draw the same.
    """
    if group is None:
        mesh = meshes.current()
        return model.groups.world if mesh is None or mesh.mesh.numel() == model.get_world_size() else None
    if isinstance(group, (list, tuple, range)) or model.transport.groups_need_all_ranks:
        return None
    return model.groups.resolve(group)


def _compare(members: Group, rows: Sequence[Any]) -> None:
    named = [facts for facts, *_ in rows]
    common = _common(named)
    different = [name for name in common if len({repr(one[name]) for one in named}) > 1]
    of_records = [name for name in different if name.startswith("contents[")]
    if any(name not in different and str(named[0][name]).endswith(_EACH_ANOTHER) for name in common):
        # The order is the same. Other fields may be of this rank: what was computed, or a folder.
        _warn_of_attributes(members, [{name: one[name] for name in of_records} for one in named])
        different = [name for name in different if name not in of_records]
    if not different:
        return
    name = different[0]
    by_rank = describe_by_rank(members.ranks, [repr(one[name]) for one in named])
    advice = _ADVICE.get(name.partition("[")[0], "")
    raise CollectiveMismatchError(
        f"auto_dataloader needs the same data set and settings on every rank, but the ranks differ in "
        f"{', '.join(different)}. By rank, {name!r} is: {by_rank}. {advice}".rstrip()
    )


def _common(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The names that all rows have."""
    return [name for name in rows[0] if all(name in row for row in rows)]


def _warn_of_attributes(members: Group, rows: Sequence[dict[str, str]]) -> None:
    """Warn of what differs and may be another path of the same data, say, so that it is no error."""
    names = [name for name in _common(rows) if len({row[name] for row in rows}) > 1]
    if names:
        warn_user(
            f"The data sets of {describe_ranks(members.ranks)} differ in {_listed(names)}: auto_dataloader "
            "needs the same data in the same order on every rank, or samples come twice and others never. "
            f"{_ADVICE['contents']}"
        )


def _warn_of_words(members: Group, rows: Sequence[dict[str, tuple[str, str]]]) -> None:
    """Warn of the same words in another order. Other words may be of this rank, or a cache that fills."""
    by_name = {name: [row[name] for row in rows] for name in _common(rows)}
    names = [
        name
        for name, found in by_name.items()
        if len({words for words, _ in found}) == 1 < len({order for _, order in found})
    ]
    if names:
        warn_user(
            f"The data sets of {describe_ranks(members.ranks)} have the same words in {_listed(names)}, but "
            "in different orders: a number that stands for a word (a label, a token) may mean another one "
            "on some ranks. A set of text may have another order in each process: take sorted(set(words))."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + " and others" * (len(names) > 3)


_ADVICE = {
    "draws of the sampler": "Make the sampler from the same indices, weights and settings on every rank: the "
    "loader splits its draws. A random order needs the same seed on every rank (generator=), or is drawn in "
    "the sampler's __iter__.",
    **dict.fromkeys(
        ("indices", "indices inside of it"),
        "A random_split draws other indices on ranks with other seeds: give it "
        "generator=torch.Generator().manual_seed(0).",
    ),
    "contents": "Pass the whole data set on every rank, not a share of it (of idist.split_by_rank, say): the "
    "loader splits it. For each rank's own data use torch's DataLoader. Random data needs the same seed on "
    "every rank: seed_everything(0, per_rank=False).",
    "number of samples": "Pass the whole data set on every rank: the loader splits it. For each rank's own "
    "data use torch's DataLoader.",
}


_SETTINGS_OF_SAMPLERS = ("batch_size", "drop_last", "replacement", "seed", "shuffle")


def _draws_of(sampler: Any) -> str:
    """What determines the draws of torch's samplers. Of others the length and the numbers that they keep.

    A sampler that was made for a rank may have other ones on each.
    """
    if _holds_numbers(sampler):
        return f"{len(sampler)} draws {_digest_of_numbers(sampler)}"
    is_of_rank = place_of(sampler) is not None
    facts = [] if is_of_rank else [f"{length_or_none(sampler)} draws"]
    for one in with_all_inner(sampler):
        if type(one).__module__.startswith("torch.utils.data."):
            names = [name for name in _SETTINGS_OF_SAMPLERS if hasattr(one, name)]
            facts += [f"{name}={getattr(one, name)!r}" for name in names]
            if isinstance(one, SubsetRandomSampler):
                facts.append(f"indices {_digest_of_indices(one.indices)}")
            if isinstance(one, WeightedRandomSampler):
                facts.append(f"weights {_digest(one.weights)}")
        elif not is_of_rank:
            held = [(name, value) for name, value in sorted(_vars(one).items()) if _holds_numbers(value)]
            facts += [f"{name} {_digest_of_numbers(value)}" for name, value in held]
    return ", ".join(facts)


def _digest_of_numbers(value: Any) -> str:
    if type(value) not in (list, tuple):
        return _digest(value)
    return _digest(_some(value)) if type(value[0]) in (list, tuple) else _digest_of_indices(value)


def _vars(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _holds_numbers(value: Any) -> bool:
    """True for a tensor, an array, and a list or tuple of numbers or of lists of them, with any elements."""
    if type(value) in (list, tuple):
        return bool(value) and (type(value[0]) in (int, float) or _holds_numbers(value[0]))
    return (_is_array(value) or (type(value) is Tensor and not value.is_meta)) and value.ndim > 0


def _digests(dataset: Dataset[Any] | Any) -> tuple[str | None, dict[str, str]]:
    """Digests of the indices of subsets, and of some items of data that is in memory, by name."""
    indices = []
    while isinstance(dataset, Subset):
        indices.append(_digest_of_indices(dataset.indices))
        dataset = dataset.dataset
    contents: dict[str, str] = {}
    if type(dataset) is range:
        contents["contents"] = repr(dataset)
    elif type(dataset) is TensorDataset:
        contents["contents"] = _digest([_some(tensor) for tensor in dataset.tensors])
    elif _is_in_memory(dataset):
        with suppress(Exception):  # raised by a class of the script, or of another thread's change
            contents = _digests_of_items("contents", _some(dataset))
    return "/".join(indices) or None, contents


def _indices_inside(datasets: Sequence[Any]) -> str | None:
    """A digest of the indices of subsets in other data sets: of one split in a ``ConcatDataset``, say."""
    found = [one.indices for one in datasets[1:] if isinstance(one, Subset)]
    return "/".join(map(_digest_of_indices, found)) or None


def _inner_datasets(dataset: Any) -> list[Any]:
    """The data set, those that its attributes have, and so on."""
    found = [dataset]
    for one in found:  # which grows
        for value in _vars(one).values():
            is_list = type(value) in (list, tuple) and value and isinstance(value[0], Dataset)
            for item in islice(value if is_list else (value,), _MOST_DATASETS):
                if isinstance(item, Dataset) and not any(item is other for other in found):
                    found.append(item)
                if len(found) == _MOST_DATASETS:
                    return found
    return found


def _named_attributes(datasets: Sequence[Any]) -> Iterator[tuple[str, Any, int | None]]:
    """The attributes of data sets of the script's own classes: name, value, number of samples."""
    for number, one in enumerate(datasets):
        if not type(one).__module__.startswith("torch.utils.data."):
            size = length_or_none(one)
            for name, value in _vars(one).items():
                yield f"{type(one).__name__}.{name}{f' ({number})' * (number > 0)}", value, size


def _attributes_of(datasets: Sequence[Any]) -> dict[str, str]:
    """Digests of some items of what data sets have for each sample: names of files, labels."""
    digests = {}
    for name, value, size in _named_attributes(datasets):
        if _is_in_memory(value):
            with suppress(Exception):  # raised by an array or a tensor of another kind
                items = _some(value) if len(value) == size else []
                if items and not any(item is None for item in items):  # it is no cache
                    digests.update(_digests_of_items(name, [_base_name(item) for item in items]))
    return digests


def _words_of(datasets: Sequence[Any], others: Container[str]) -> dict[str, tuple[str, str]]:
    """Digests of lists and dicts that have words, in attributes but ``others``: in any order, and in theirs.

    A set of text may have another order in each process, a set of numbers has the same one.
    """
    digests = {}
    for name, value, _ in _named_attributes(datasets):
        is_dict = isinstance(value, dict)
        if name in others or not (is_dict or type(value) in (list, tuple)) or len(value) > _MOST_WORDS:
            continue
        with suppress(Exception):  # another thread may fill a dict
            rows = list(dict.items(value)) if is_dict else [(one,) for one in value]
            columns = list(zip(*rows, strict=True))
            kinds = {*map(type, chain(*columns))}
            words = [one for one in chain(*columns) if type(one) in (str, bytes)]
            if words and kinds.issubset(_PLAIN) and max(map(len, words)) <= _LONGEST_WORD:
                texts = [list(map(repr, column)) for column in columns]
                pairs = map(" ".join, zip(*texts, strict=True))
                in_any_order = chain.from_iterable(map(sorted, texts))
                in_order = sorted(pairs) if is_dict else pairs
                digests[name] = _digest_of_texts(in_any_order), _digest_of_texts(in_order)
    return digests


def _digest_of_texts(texts: Iterable[str]) -> str:
    return hashlib.sha1("\n".join(texts).encode(), usedforsecurity=False).hexdigest()[:12]


def _digests_of_items(name: str, items: Sequence[Any]) -> dict[str, str]:
    """A digest of items; of records the name of their class, and a digest of each field as ``name[field]``.

    A field that some items lack, or that is None there, may be a cache that fills: it is left out, and ranks
    compare the fields that all of them have. A field in which each item has another value is marked so.
    """
    records = [record for item in items if (record := _record(item)) is not None]
    if not items or len(records) < len(items):
        return {name: _digest(items)}
    digests = {name: type(items[0]).__name__}
    common = set(records[0]).intersection(*records[1:])
    for field in sorted(common)[:_MOST_FIELDS]:
        values = [record[field] for record in records]
        if not any(value is None for value in values):
            shows_order = len({_digest(value) for value in values}) == len(values) > 1
            digests[f"{name}[{field}]"] = _digest(values) + _EACH_ANOTHER * shows_order
    if not common and all(records):  # numbers of words, say
        digests[f"{name}[...]"] = _digest(items)
    return digests


def _record(value: Any) -> dict[str, Any] | None:
    """The fields of a dict, a named tuple or a data class, by name; None if ``value`` is none of these.

    Of a large dict no fields are compared.
    """
    if isinstance(value, dict):
        items: Any = list(dict.items(value)) if len(value) <= 2 * _MOST_ITEMS else []
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=False)
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(one.name, _field(value, one.name)) for one in fields(value) if one.compare]
    else:
        return None
    # Others, such as objects as keys, have no order and no name that is equal on all ranks.
    return {repr(key): _base_name(item) for key, item in items if type(key) in _PLAIN}


def _field(value: Any, name: str) -> Any:
    """The value of a data class's field; None if only a property of the script could tell."""
    own = getattr(value, "__dict__", {})
    is_slot = isinstance(getattr_static(type(value), name, None), MemberDescriptorType)
    return getattr(value, name, None) if is_slot else own.get(name)


def _base_name(item: Any) -> Any:
    """``item`` with the names of files instead of paths: their folder may differ by machine."""
    if type(item) in (list, tuple):
        return [_base_name(one) for one in item[:_MOST_ITEMS]]
    if isinstance(item, PurePath):  # another path's name may have to be fetched
        return item.name
    return os.path.basename(item) if isinstance(item, str) and _may_be_path(item) else item


def _may_be_path(text: str) -> bool:
    """False for a sentence: it may end with ``</s>``, say, which is no name of a file."""
    return len(text) < 4096 and (os.path.isabs(text) or len(text.split(None, 1)) == 1)


_MOST_DATASETS = 64
_MOST_ITEMS = 1024  # that a digest takes from each end of a tensor, list or text
_MOST_FIELDS = 16  # of a record that are compared
_MOST_WORDS, _LONGEST_WORD = 1 << 16, 128  # of what counts as words, not as data
_MOST_VALUES = 1 << 13  # of a digest, in all of its lists and records
_EACH_ANOTHER = " of items that are all different"
_PLAIN = (str, bytes, int, float, bool, complex, type(None))
_END = object()


def _is_in_memory(value: Any) -> bool:
    """True if items of it can be looked at: this runs no code of the script, and reads no file."""
    return type(value) in (list, tuple, Tensor) or _is_array(value) or _is_frame(value)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _is_frame(value: Any) -> bool:
    pandas: Any = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series))


def _some(items: Any) -> list[Any]:
    size = len(items)
    numbers = sorted({0, size // 2, size - 1}) if size else []
    if _is_frame(items):  # labels too: the rows that df.sample(frac=1) moves may be equal
        rows = items.iloc[numbers]
        return list(zip(rows.index.tolist(), rows.to_numpy(dtype=object).tolist(), strict=True))
    return [items[number] for number in numbers]


def _digest_of_indices(indices: Any) -> str:
    hashed = hashlib.sha1(usedforsecurity=False)
    values = indices.tolist() if hasattr(indices, "tolist") else list(indices)
    try:
        hashed.update(array("q", values))
    except (TypeError, OverflowError):  # names, for example
        for part in _parts(values, len(values)):
            hashed.update(part)
    return hashed.hexdigest()[:12]


def _digest(value: Any) -> str:
    hashed = hashlib.sha1(usedforsecurity=False)
    for part in islice(_parts(value, _MOST_ITEMS), _MOST_VALUES):
        hashed.update(part)
    return hashed.hexdigest()[:12]


def _parts(value: Any, most: int) -> Iterator[bytes]:
    """What to hash: the ends of plain values, of the values in lists and records, and the types of others."""
    waiting: list[Iterator[Any]] = [iter([value])]
    while waiting:
        one: Any = next(waiting[-1], _END)
        if one is _END:
            waiting.pop()
        elif type(one) in (list, tuple):
            yield f"{len(one)}".encode()
            waiting.append(chain.from_iterable(_ends(one, most)))
        elif (record := _record(one)) is not None:
            yield f"{type(one).__qualname__} {len(record)}".encode()
            # In an order that does not depend on how the record was made.
            waiting.append(chain(*([key, record[key]] for key in sorted(record))))
        elif _is_array(one) and one.dtype.hasobject:  # its bytes are addresses
            yield f"{one.dtype} {one.shape}".encode()
            waiting.append(chain.from_iterable(end.tolist() for end in _ends(one.reshape(-1), most)))
        else:
            yield from _parts_of_leaf(one, most)


def _parts_of_leaf(value: Any, most: int) -> Iterator[bytes]:
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if not value.is_quantized:
            for end in _ends(value.detach().reshape(-1), most):
                plain = end.cpu().resolve_conj().resolve_neg().contiguous()
                yield bytes(as_bytes(plain).tolist())  # without numpy
    elif type(value) in (str, bytes):
        yield f"{len(value)} {_ends(value, most)}".encode()
    elif type(value) in _PLAIN:
        yield repr(value).encode()
    elif _is_array(value):
        yield f"{value.dtype} {value.shape}".encode()
        for end in _ends(value.reshape(-1), most):
            yield end.tobytes()
    else:
        yield type(value).__qualname__.encode()


def _ends(items: Any, most: int) -> list[Any]:
    """The first and the last ``most`` items."""
    return [items] if len(items) <= 2 * most else [items[:most], items[-most:]]
