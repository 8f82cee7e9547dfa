"""A view is sent without the rest of its storage, and what is shared in an object stays shared."""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from ignite_dist import CollectiveMismatchError
from ignite_dist.testing.conformance.cases import safe_mode
from ignite_dist.values import serialization, views

OVERHEAD = 3_000  # bytes of a message without data; a zip file has more than a pickle


def by_pickle(value: Any) -> tuple[Any, int]:
    payload = serialization.encode(value)
    return serialization.decode(payload), len(payload)


def by_value(value: Any) -> tuple[Any, int]:
    payload = serialization.encode_by_value(value)
    return serialization.decode(payload), len(payload)


def by_torch_save(value: Any) -> tuple[Any, int]:
    file = io.BytesIO()
    views.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False), len(file.getvalue())


def when_safe(value: Any) -> tuple[Any, int]:
    with safe_mode():
        payload = serialization.pack(value)
        return serialization.unpack(payload, rank=0), len(payload)


Send = Callable[[Any], tuple[Any, int]]
all_ways = pytest.mark.parametrize("send", [by_pickle, by_value, by_torch_save, when_safe])


def batch() -> Tensor:
    return torch.arange(400 * 256, dtype=torch.float32).view(400, 256)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[7],
    "last row": lambda x: x[-1],
    "rows": lambda x: x[3:9],
    "part of a row": lambda x: x[5, 9:11],
    "transposed rows": lambda x: x[3:9].t(),
    "expanded row": lambda x: x[7].expand(90, 256),
    "column": lambda x: x[:, 7],
    "columns": lambda x: x[:, 7:11],
    "columns, transposed": lambda x: x[:, 7:11].t(),
    "every third element": lambda x: x[::3, ::3],
    "expanded column": lambda x: x[:, :1].expand(400, 90),
    "diagonal": lambda x: x.diagonal(),
    "element": lambda x: x[7, 8],
    "no rows": lambda x: x[400:],
    "sliding windows": lambda x: x[7].unfold(0, 9, 1),
    "bytes": lambda x: x.view(torch.uint8)[7, 3:10],
    "real parts": lambda x: torch.view_as_complex(x.view(400, 128, 2))[3].real,
    "conjugate": lambda x: torch.view_as_complex(x.view(400, 128, 2))[3].conj(),
    "negative": lambda x: torch.view_as_complex(x.view(400, 128, 2))[3].conj().imag,
}


@all_ways
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_costs_its_own_bytes(send: Send, name: str) -> None:
    view = VIEWS[name](batch())
    num_bytes = {"expanded": 400 * 4, "sliding": 256 * 4}.get(name.split()[0], view.nbytes)
    copy, size = send({"view": view})
    assert size <= 2 * num_bytes + OVERHEAD  # complex numbers have two parts
    assert torch.equal(copy["view"], view) and copy["view"].dtype is view.dtype
    has_gaps = any(word in name for word in ("column", "every", "diagonal", "parts", "negative"))
    assert has_gaps or copy["view"].stride() == view.stride()
    assert [step == 0 for step in copy["view"].stride()] == [step == 0 for step in view.stride()]
    assert (copy["view"].is_conj(), copy["view"].is_neg()) == (view.is_conj(), view.is_neg())


@all_ways
@pytest.mark.parametrize("step", [1, 2])
def test_a_list_of_rows_costs_the_bytes_of_the_rows(send: Send, step: int) -> None:
    rows = list(batch()[::step])
    copies, size = send(rows)
    assert size < 1.3 * len(rows) * rows[0].nbytes + OVERHEAD
    assert torch.equal(torch.stack(copies), torch.stack(rows))


def shares(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


@all_ways
def test_views_that_overlap_or_touch_stay_shared(send: Send) -> None:
    x = batch()
    (a, b, c, d), size = send([x[10:12], x[11, :9], x[12], x[100]])
    assert size < 4 * 1024 + OVERHEAD
    a[1, 3] = -1
    assert b[3] == -1
    assert shares(a, c) and not shares(a, d)
    assert torch.equal(c, x[12]) and torch.equal(d, x[100])


@pytest.mark.parametrize("send", [by_pickle, by_value])
def test_views_of_other_dtypes_stay_shared(send: Send) -> None:
    x = batch()
    views = [x[3].view(torch.uint8)[3:9], x[3, 2:5], torch.view_as_complex(x[3, 4:6])]
    copies = send(views)[0]
    assert all(torch.equal(copy, view) for copy, view in zip(copies, views, strict=True))
    assert all(shares(copies[0], copy) for copy in copies)


@all_ways
def test_views_that_cover_a_storage_stay_shared(send: Send) -> None:
    x = batch()
    top, bottom, columns, whole = send([x[:200], x[200:], x[:, 3], x])[0]
    assert shares(top, bottom) and top.untyped_storage().nbytes() == x.nbytes
    whole[0, 3] = -1
    assert columns[0] == -1 and top[0, 3] == -1
    columns = send(list(x.t()))[0]
    assert all(shares(columns[0], column) for column in columns)


@all_ways
def test_equal_views_with_gaps_stay_shared(send: Send) -> None:
    x = batch()
    first, second = send([x[:, 3], x[:, 3].detach()])[0]
    assert shares(first, second)


@all_ways
def test_the_same_tensor_and_tied_weights_stay_the_same(send: Send) -> None:
    row = batch()[3]
    tied = Parameter(batch()[:2])
    first, second, weights = send([row, row, {"a.weight": tied, "b.weight": tied}])[0]
    assert first is second
    assert weights["a.weight"] is weights["b.weight"]


def test_a_module_with_tied_weights() -> None:
    model = torch.nn.Sequential(Linear(3, 3), Linear(3, 3))
    model[1].weight = model[0].weight
    copy = by_pickle(model)[0]
    assert copy[1].weight is copy[0].weight
    assert copy[0].weight.grad is None and copy[0].weight.is_leaf


# --- kinds of tensors --------------------------------------------------------------------------------


class Named(Tensor):
    """A subclass with an attribute."""


def traits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.requires_grad, type(tensor), tensor.layout, tensor.is_quantized


@pytest.mark.parametrize("send", [by_pickle, by_value, by_torch_save])
def test_kinds_of_tensors_are_kept(send: Send) -> None:
    x = batch()
    named = x[3].as_subclass(Named)
    named.note = "validation"  # type: ignore[attr-defined]
    annotated = x[4]
    annotated.note = [1]  # type: ignore[attr-defined]
    leaf = x[5].clone().requires_grad_()
    scales, zeros = torch.full((400,), 0.5), torch.zeros(400, dtype=torch.int64)
    kinds = [
        *(Parameter(x[6]), Parameter(x[7], requires_grad=False), named, annotated, leaf, (leaf * 2)[3:7]),
        torch.quantize_per_tensor(x, 1000.0, 3, torch.qint8)[3],
        torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8),
        *(x[:2].to_sparse(), x[:2].to_sparse_csr(), torch.nested.nested_tensor([x[3], x[4, :9]])),
        *(torch.empty(0, 3), torch.empty(0, dtype=torch.int8), torch.tensor(2.5)),
    ]
    copies, size = send(kinds)
    assert size < x.nbytes // 4 + 3 * x.nbytes // 100 + 100_000  # qint8 per channel is a whole batch
    for copy, kind in zip(copies, kinds, strict=True):
        assert traits(copy) == traits(kind)
        plain = [one.detach() for one in (copy, kind)]
        plain = [one.dequantize() if one.is_quantized else one for one in plain]
        plain = [one.values() if one.is_nested else one.to_dense() for one in plain]
        assert torch.equal(plain[0], plain[1])
    assert copies[2].note == "validation" and copies[3].note == [1]
    assert copies[4].is_leaf and copies[5].requires_grad


@all_ways
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_dtypes_that_plain_pickle_cannot_load(send: Send, dtype: torch.dtype) -> None:
    x = batch().view(torch.uint8).view(dtype)
    annotated = x[8]
    annotated.note = [1]  # type: ignore[attr-defined]
    sent = [x[3, 4:], x[3, :9], x[:, 1], annotated, x[:0]]
    copies, size = send(sent)
    assert size < x.nbytes // 20 + OVERHEAD
    for copy, one in zip(copies, sent, strict=True):
        assert copy.dtype is dtype and copy.shape == one.shape
        assert torch.equal(copy.contiguous().view(torch.uint8), one.contiguous().view(torch.uint8))


@pytest.mark.parametrize("send", [by_pickle, by_torch_save])
def test_meta_tensors_have_no_data(send: Send) -> None:
    copy, size = send(torch.empty(10**6, device="meta")[3:7])
    assert (copy.shape, copy.device.type) == ((4,), "meta")
    assert size < OVERHEAD


def test_hooks_are_left_out_with_torchs_warning() -> None:
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match="not be serialized"):
        copy = by_pickle(leaf)[0]
    assert not copy._backward_hooks


def restored(text: str) -> str:
    return text


class Special(Tensor):
    """A subclass with a reducer of the user."""


@contextmanager
def reducer(kind: type, reduce: Callable[[Any], Any]) -> Iterator[None]:
    copyreg.pickle(kind, reduce)
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]


@pytest.mark.parametrize("send", [by_pickle, by_value, by_torch_save])
def test_a_reducer_of_the_user_is_used(send: Send) -> None:
    with reducer(Special, lambda _: (restored, ("by the user",))):
        assert send([torch.ones(3).as_subclass(Special)])[0] == ["by the user"]


class Makes:
    """Pickled with new tensors each time, whose memory is reused."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> Any:
        return Makes, ([(tensor + 1)[1:3] for tensor in self.tensors],)


@pytest.mark.parametrize("send", [by_pickle, by_torch_save])
def test_tensors_that_are_made_for_the_pickle(send: Send) -> None:
    x = batch()
    rows, made = send([x[3], Makes([torch.full((4,), float(n)) for n in range(100)])])[0]
    assert torch.equal(rows, x[3])
    assert [one.tolist() for one in made.tensors] == [[n + 1.0] * 2 for n in range(100)]


def test_storages_that_are_not_of_a_tensor() -> None:
    storage = torch.arange(10).untyped_storage()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy, same = by_pickle([storage, storage])[0]
    assert copy.tolist() == storage.tolist() and copy is same


# --- numpy -------------------------------------------------------------------------------------------


@all_ways
def test_views_of_numpy_arrays_cost_their_own_bytes(send: Send) -> None:
    numpy = pytest.importorskip("numpy")
    x = batch().numpy()
    for view in (x[3], x[::-1][:4], x[:, 7], x[::3, ::-3], numpy.broadcast_to(x[0, :1], (9,)), x[400:]):
        copy, size = send({"view": view})
        assert size < 2 * view.nbytes + OVERHEAD
        assert numpy.array_equal(copy["view"], view)
    large = x.copy()
    assert numpy.array_equal(send(large)[0], x)


# --- large buffers -----------------------------------------------------------------------------------


def lies_in(tensor: Tensor, payload: bytearray | memoryview) -> bool:
    start = serialization.as_tensor(payload).data_ptr()
    return start <= tensor.data_ptr() < start + len(payload)


def test_large_tensors_and_arrays_are_not_copied_from_a_message() -> None:
    numpy = pytest.importorskip("numpy")
    x = batch()
    value = {"a": x, "b": [x.numpy().copy(), torch.arange(3)], "c": x[1:300], "d": numpy.arange(10)}
    payload = serialization.encode(value)
    assert isinstance(payload, (bytearray, memoryview))
    assert len(payload) < 2.1 * x.nbytes
    copy = serialization.decode(payload)
    large = [copy["a"], torch.from_numpy(copy["b"][0]), copy["c"]]
    assert all(lies_in(one, payload) for one in large)
    assert torch.equal(copy["a"], x) and torch.equal(large[1], x) and torch.equal(copy["c"], x[1:300])
    assert all(one.data_ptr() % 16 == 0 for one in (copy["a"], large[1]))
    assert not lies_in(copy["b"][1], payload)  # a small one would keep the message in memory
    copy["a"][0] = 7
    assert copy["c"][0, 0] == x[1, 0] and x[0, 0] == 0


def test_bytes_that_cannot_be_written_to_are_copied() -> None:
    payload = bytes(serialization.encode(batch()))
    for one in (payload, memoryview(payload)):
        serialization.decode(one).zero_()
    assert torch.equal(serialization.decode(payload), batch())


def test_an_array_that_is_only_read_stays_so() -> None:
    array = batch().numpy().copy()
    array.flags.writeable = False
    assert not by_pickle(array)[0].flags.writeable


def test_small_tensors_can_be_resized() -> None:
    assert by_pickle(torch.ones(3))[0].resize_(10).shape == (10,)


@pytest.mark.parametrize("size", [5, 21, 100, -1])
def test_a_part_of_a_message_is_refused(size: int) -> None:
    payload = serialization.encode({"a": batch(), "b": batch()})
    with pytest.raises(CollectiveMismatchError, match="rank 3"):
        serialization.unpack(memoryview(payload)[:size], rank=3)


def test_old_pickles_are_read() -> None:
    payload = pickle.dumps({"row": batch()[3]})
    assert torch.equal(serialization.decode(payload)["row"], batch()[3])
