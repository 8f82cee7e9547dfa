from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ignite_dist.values import carriers, number_ops, reduce_ops

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
INTS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
EVERY_OP = (*ARITHMETIC, *reduce_ops.BITWISE)


class Backend:
    """A backend that carries a few dtypes and operations, and reduces as backends do."""

    def __init__(self, *dtypes: torch.dtype, ops: Sequence[str] = EVERY_OP) -> None:
        self.dtypes, self.ops = dtypes, ops

    def carries(self, op: str, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes and op in self.ops

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> Tensor:
        """What every rank gets where rank ``i`` has ``tensors[i]``."""
        dtype = tensors[0].dtype
        carrier = carriers.find_carrier(op, dtype, self.carries)
        assert carrier is not None, f"no carrier for {op} of {dtype}"
        assert self.carries(carrier.op, carrier.dtype)
        before = [tensor.clone() for tensor in tensors]
        sent = [carrier.encode(tensor) for tensor in tensors]
        assert all(one.dtype is carrier.dtype for one in sent)
        # Not in place: what is sent may be a view of what was given.
        total = sent[0].clone()
        for one in sent[1:]:
            total = _combine(total, one, carrier.op)
        if op == "AVERAGE":
            total = total / len(tensors)
        result = carrier.decode(total)
        assert result.dtype is dtype
        for tensor, copy in zip(tensors, before, strict=True):
            assert_same(tensor, copy)  # encoding has left the caller's memory alone
        return result


def _combine(a: Tensor, b: Tensor, op: str) -> Tensor:
    if op in ("MIN", "MAX") and a.dtype.is_floating_point:  # as C++ does, without a thought for NaN
        return torch.where(b < a if op == "MIN" else b > a, b, a)
    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "AND": torch.bitwise_and,
        "OR": torch.bitwise_or,
        "XOR": torch.bitwise_xor,
    }
    return operations[op](a, b)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# --- names and checks --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", reduce_ops.OPS)
def test_ops_in_upper_lower_and_mixed_case(op: str) -> None:
    assert reduce_ops.normalize_op(op) == reduce_ops.normalize_op(op.lower()) == op
    assert reduce_ops.normalize_op(op.capitalize()) == op


@pytest.mark.parametrize("op", ["MEAN", "", None, 3, ["SUM"], torch.add])
def test_an_unknown_op_is_a_value_error_that_lists_what_is_allowed(op: Any) -> None:
    with pytest.raises(ValueError, match=r"SUM.*AVERAGE.*PRODUCT.*MIN.*MAX.*AND.*OR") as info:
        reduce_ops.normalize_op(op)
    assert repr(op) in str(info.value)


@pytest.mark.parametrize(
    ("ops", "dtypes"),
    [
        (reduce_ops.BITWISE, [*FLOATS, *COMPLEX]),
        (("MIN", "MAX"), COMPLEX),
        (("SUM", "PRODUCT"), [torch.bool]),
        (("AVERAGE",), [torch.bool, *INTS]),
    ],
)
def test_what_has_no_exact_meaning_is_refused(ops: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
    for op, dtype in itertools.product(ops, dtypes):
        with pytest.raises(TypeError, match=op) as info:
            reduce_ops.check_op(op, dtype)
        assert "Use" in str(info.value) or "Reduce" in str(info.value)


def test_everything_else_is_allowed() -> None:
    for op, dtype in itertools.product(ARITHMETIC, [*FLOATS, *INTS]):
        reduce_ops.check_op(op, dtype)
    for op, dtype in itertools.product(("SUM", "AVERAGE", "PRODUCT"), [*FLOATS, *COMPLEX]):
        reduce_ops.check_op(op, dtype)
    for op, dtype in itertools.product(reduce_ops.BITWISE, [torch.bool, *INTS]):
        reduce_ops.check_op(op, dtype)
    for op in ("MIN", "MAX"):
        reduce_ops.check_op(op, torch.bool)


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "numbers", "expected"),
    [
        ("SUM", [2**200, 1, -1], 2**200),
        ("SUM", [0, 1.5], 1.5),
        ("SUM", [True, True, False], 2),
        ("SUM", [0.1, 0.2, 0.3], (0.1 + 0.2) + 0.3),
        ("SUM", [Fraction(1, 3), Fraction(1, 6)], Fraction(1, 2)),
        ("SUM", [Decimal("0.1"), Decimal("0.2")], Decimal("0.3")),
        ("SUM", [1 + 2j, 3], 4 + 2j),
        ("PRODUCT", [2**70, 2**70], 2**140),
        ("PRODUCT", [True, True], 1),
        ("AVERAGE", [1, 2], 1.5),
        ("AVERAGE", [True, False], 0.5),
        ("MIN", [2**53 + 1, float(2**53)], float(2**53)),
        ("MAX", [2**53 + 1, float(2**53)], 2**53 + 1),
        ("MIN", [math.inf, 3], 3),
        ("MAX", [-math.inf, -3], -3),
        ("AND", [0b110, 0b011], 0b010),
        ("OR", [0b110, 0b011], 0b111),
        ("XOR", [0b110, 0b011], 0b101),
        ("AND", [True, False], False),
        ("OR", [True, False], True),
        ("XOR", [True, True], False),
        ("AND", [True, 3], 1),
    ],
)
def test_numbers_are_reduced_with_pythons_own_arithmetic(op: str, numbers: list[Any], expected: Any) -> None:
    for number in numbers:
        number_ops.check_number_op(op, number)
    result = number_ops.reduce_numbers([[number] for number in numbers], op)[0]
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR"])
def test_a_world_of_one_gives_the_type_of_a_world_of_two(op: str) -> None:
    for number in (True, 3) if op in reduce_ops.BITWISE else (True, 3, 2.5):
        alone = number_ops.reduce_numbers([[number]], op)[0]
        together = number_ops.reduce_numbers([[number], [number]], op)[0]
        assert type(alone) is type(together)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_on_any_rank_is_the_min_and_the_max(op: str, position: int) -> None:
    numbers: list[float] = [1.0, -math.inf, 5]
    numbers[position] = math.nan
    assert math.isnan(number_ops.reduce_numbers([[number] for number in numbers], op)[0])


@pytest.mark.parametrize(
    ("op", "number", "error"),
    [
        ("AND", 1.0, TypeError),
        ("OR", Fraction(1, 2), TypeError),
        ("XOR", 0.5, TypeError),
        ("MIN", 1j, TypeError),
        ("MAX", 1j, TypeError),
        ("ADASUM", 1.0, ValueError),
    ],
)
def test_numbers_that_an_op_does_not_take(op: str, number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=op):
        number_ops.check_number_op(op, number)


# --- rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_rows_are_reduced_in_rank_order(op: str) -> None:
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    expected = rows[0]
    for row in rows[1:]:
        expected = _combine(expected, row, op)
    copy = rows.clone()
    out = torch.empty(1000)
    assert reduce_ops.reduce_rows(rows, op, out) is out
    assert torch.equal(out, expected)  # the same bits
    assert torch.equal(rows, copy)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_added_up_as_floats_and_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.tensor([[_lonely(dtype)], [1.0], [1.0], [1.0], [1.0]], dtype=dtype)
    reduced = reduce_ops.reduce_rows(rows, "SUM", torch.empty(1, dtype=dtype))
    assert reduced.item() == _lonely(dtype) + 4


def _lonely(dtype: torch.dtype) -> float:
    """A number to which 4 can be added, and 1 is lost."""
    return 2 / torch.finfo(dtype).eps


def test_a_sum_next_to_the_middle_of_two_halves_goes_to_the_nearer_one() -> None:
    """torch's own way from float64 by float32 would take it for the middle."""
    one, step = 1.0, 2.0**-10
    for tiny, expected in ((2.0**-24, one + step), (-(2.0**-24), one), (0.0, one)):
        rows = torch.tensor([[one], [step / 2], [tiny], [0.0]], dtype=torch.float16)
        assert reduce_ops.reduce_rows(rows, "SUM", torch.empty(1, dtype=torch.float16)).item() == expected
        assert Backend(torch.float64).all_reduce(list(rows), "SUM").item() == expected
    assert torch.tensor(one + step / 2 + 2.0**-40, dtype=torch.float64).half() == one, "torch's own way"
    rows = torch.tensor([[3e38], [3e38], [-3e38]], dtype=torch.bfloat16)
    assert torch.equal(reduce_ops.reduce_rows(rows, "SUM", torch.empty(1, dtype=torch.bfloat16)), rows[0])


@pytest.mark.parametrize("op", ["SUM", "AVERAGE", "PRODUCT"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.complex32], ids=str)
def test_halves_never_go_as_themselves(op: str, dtype: torch.dtype) -> None:
    for others, sent in (((), None), ([torch.float32], torch.float32), (FLOATS, torch.float64)):
        carrier = carriers.find_carrier(op, dtype, Backend(*HALVES, *others).carries)
        if dtype is torch.complex32 and op == "PRODUCT":
            assert carrier is None
        else:
            assert (carrier and carrier.dtype) is sent
    own = carriers.find_carrier("SUM", torch.float16, Backend(*FLOATS).carries, exact=False)
    assert own is not None
    assert own.dtype is torch.float16


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.float64])
def test_one_row_is_itself_and_a_new_tensor(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 0, 1]]).to(dtype)
    out = reduce_ops.reduce_rows(rows, "MAX", torch.empty(3, dtype=dtype))
    assert torch.equal(out, rows[0])
    assert out.data_ptr() != rows.data_ptr()


# --- MIN and MAX of floats, row by row ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_rows_have_the_least_and_greatest_floats_of_ordered_ints(op: str, dtype: torch.dtype) -> None:
    """Both ways give the same bits, except for a NaN."""
    values = torch.tensor(list(itertools.product(_special(dtype), repeat=3)), dtype=dtype).t()
    for repeats in (1, 1 + 2 * reduce_ops._BLOCK // values.shape[1]):  # more than one block
        rows = list(values.repeat(1, repeats).contiguous())
        expected = Backend(torch.int32, torch.int64).all_reduce(rows, op)
        found = reduce_ops.reduce_rows(rows, op, torch.empty_like(rows[0]))
        assert_same(found, expected)
        is_number = ~expected.isnan()
        assert torch.equal(found.signbit()[is_number], expected.signbit()[is_number])
        assert_same(carriers.reduce_gathered(torch.stack(rows), op), expected)


# --- carriers: MIN and MAX of floats as ordered ints --------------------------------------------------


def _special(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    subnormal = torch.tensor(info.smallest_normal, dtype=dtype).div(2).item()
    positive = [0.0, subnormal, info.smallest_normal, info.eps, 1.0, 1.0 + info.eps, 3.5, info.max, math.inf]
    return [*positive, *(-value for value in positive), math.nan]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("integers", [(torch.int32, torch.int64)], ids=["ints"])
def test_min_and_max_of_floats_over_a_backend_of_ints(dtype: torch.dtype, integers: Any) -> None:
    backend = Backend(*integers)
    pairs = torch.tensor(list(itertools.product(_special(dtype), repeat=2)), dtype=dtype).t()
    triples = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).mul(1000).to(dtype)
    for rows in (pairs, triples):
        tensors = list(rows.contiguous())
        assert_same(backend.all_reduce(tensors, "MIN"), rows.amin(0))
        assert_same(backend.all_reduce(tensors, "MAX"), rows.amax(0))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_negative_zero_is_less_than_zero_whichever_rank_has_it(dtype: torch.dtype) -> None:
    backend = Backend(torch.int32, torch.int64)
    zeros = [torch.tensor([0.0, -0.0], dtype=dtype), torch.tensor([-0.0, 0.0], dtype=dtype)]
    assert backend.all_reduce(zeros, "MIN").signbit().tolist() == [True, True]
    assert backend.all_reduce(zeros, "MAX").signbit().tolist() == [False, False]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_of_either_sign_wins_on_any_rank(dtype: torch.dtype) -> None:
    backend = Backend(torch.int32, torch.int64)
    nan = torch.tensor(math.nan, dtype=dtype)
    negative = torch.copysign(nan, torch.tensor(-1.0, dtype=dtype))
    assert negative.signbit()
    for one in (nan, negative):
        for other in (math.inf, -math.inf, 0.0):
            tensors = [one.view(1), torch.tensor([other], dtype=dtype)]
            for op in ("MIN", "MAX"):
                assert backend.all_reduce(tensors, op).isnan().all()
                assert backend.all_reduce(tensors[::-1], op).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_not_reduced_as_floats_even_where_the_backend_could(dtype: torch.dtype) -> None:
    """A backend's own MIN keeps or drops a NaN depending on the rank that it came from."""
    backend = Backend(*FLOATS, torch.int32, torch.int64)
    tensors = [torch.tensor([1.0, math.nan], dtype=dtype), torch.tensor([math.nan, 1.0], dtype=dtype)]
    for op in ("MIN", "MAX"):
        assert backend.all_reduce(tensors, op).isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 0, 2)])
def test_carriers_keep_any_shape(shape: tuple[int, ...]) -> None:
    backend = Backend(torch.int32, torch.int64, torch.float64)
    for dtype in FLOATS:
        tensor = torch.ones(shape, dtype=dtype)
        for op in ("SUM", "AVERAGE", "MIN", "MAX"):
            assert backend.all_reduce([tensor, tensor], op).shape == shape


# --- carriers: wider dtypes --------------------------------------------------------------------------


@pytest.mark.parametrize("op", EVERY_OP)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_ints_of_every_kind_over_a_backend_of_int64(dtype: torch.dtype, op: str) -> None:
    info = torch.iinfo(dtype)
    values = [info.min, info.max, 0, 1, 3, info.max // 2 + 1, 100]
    pairs = list(itertools.product(values, repeat=2))
    tensors = [torch.tensor([pair[rank] for pair in pairs], dtype=dtype) for rank in (0, 1)]
    operations: dict[str, Callable[[int, int], int]] = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "XOR": lambda a, b: a ^ b,
    }
    exact = [operations[op](*pair) for pair in pairs]
    bits = dtype.itemsize * 8
    wrapped = [(value - info.min) % 2**bits + info.min for value in exact]
    assert Backend(torch.int64).all_reduce(tensors, op).tolist() == wrapped


@pytest.mark.parametrize("op", [*reduce_ops.BITWISE, "MIN", "MAX"])
@pytest.mark.parametrize("ops", [EVERY_OP, ARITHMETIC], ids=["every-op", "arithmetic"])
@pytest.mark.parametrize("carried", [torch.bool, torch.uint8, torch.int64])
def test_bools(op: str, ops: Sequence[str], carried: torch.dtype) -> None:
    tensors = [torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])]
    bits = {"AND": [0, 0, 0, 1], "MIN": [0, 0, 0, 1], "OR": [0, 1, 1, 1], "MAX": [0, 1, 1, 1]}
    expected = {**bits, "XOR": [0, 1, 1, 0]}[op]
    if op not in ops and (carried is torch.bool or op == "XOR"):  # MIN and MAX serve AND and OR of wider ints
        assert carriers.find_carrier(op, torch.bool, Backend(carried, ops=ops).carries) is None
    else:
        assert Backend(carried, ops=ops).all_reduce(tensors, op).tolist() == [bool(bit) for bit in expected]


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_over_a_backend_of_float32_are_rounded_once(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([value], dtype=dtype) for value in (_lonely(dtype), 1.0, 1.0, 1.0, 1.0)]
    assert Backend(torch.float32).all_reduce(tensors, "SUM").item() == _lonely(dtype) + 4


def test_the_mean_of_large_halves_does_not_overflow() -> None:
    large = torch.tensor([60000.0, -60000.0], dtype=torch.float16)
    backend = Backend(*HALVES, torch.float32)
    assert torch.equal(backend.all_reduce([large, large, large], "AVERAGE"), large)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz], ids=str
)
def test_float8_goes_as_float32(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([1.5, -2.0]).to(dtype), torch.tensor([2.0, 0.5]).to(dtype)]
    backend = Backend(torch.float32, torch.int32)
    assert backend.all_reduce(tensors, "SUM").float().tolist() == [3.5, -1.5]
    assert backend.all_reduce(tensors, "MAX").float().tolist() == [2.0, 0.5]
    assert backend.all_reduce(tensors, "MIN").float().tolist() == [1.5, -2.0]


@pytest.mark.parametrize("op", ["SUM", "AVERAGE"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_goes_as_its_real_and_imaginary_parts(dtype: torch.dtype, op: str) -> None:
    tensors = [torch.tensor([1 + 2j, 0.5j], dtype=dtype), torch.tensor([3 - 1j, 1.0], dtype=dtype)]
    expected = torch.stack(tensors).sum(0) / (2 if op == "AVERAGE" else 1)
    assert_same(Backend(torch.float32, torch.float64).all_reduce(tensors, op), expected)


def test_a_lazily_conjugated_tensor_is_reduced_as_the_value_that_it_is() -> None:
    tensors = [torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 1j, 1 + 0j])]
    assert tensors[0].is_conj()
    result = Backend(torch.float32).all_reduce(tensors, "SUM")
    assert result.tolist() == [2 - 1j, 1 - 3j]


def test_the_product_of_complex_numbers_is_not_that_of_their_parts() -> None:
    for dtype in COMPLEX:
        assert carriers.find_carrier("PRODUCT", dtype, Backend(*FLOATS).carries) is None


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, *COMPLEX, torch.bool], ids=str)
def test_where_nothing_is_carried_there_is_no_carrier(dtype: torch.dtype) -> None:
    op = "OR" if dtype is torch.bool else "SUM"
    assert carriers.find_carrier(op, dtype, Backend().carries) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8])
def test_a_dtype_that_is_carried_goes_as_it_is(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    carrier = carriers.find_carrier("SUM", dtype, Backend(dtype).carries)
    assert carrier is not None
    assert (carrier.op, carrier.dtype) == ("SUM", dtype)
    assert carrier.encode(tensor) is tensor
    assert carrier.decode(tensor) is tensor


# --- what is gathered first ----------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("op", [*ARITHMETIC, "AVERAGE"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex64])
def test_gathered_rows_are_reduced_in_pieces(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, op: str
) -> None:
    with contextlib.suppress(TypeError):
        reduce_ops.check_op(op, dtype)
        rows = (torch.arange(3 * 1000) % 11 - 4).abs().to(dtype).view(3, 50, 20)
        whole = carriers.reduce_gathered(rows, op)
        monkeypatch.setattr(carriers, "PIECE_BYTES", 1000)
        result = carriers.reduce_gathered(rows, op)
        assert result.dtype is dtype and result.shape == whole.shape
        assert torch.equal(result.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("numel", [10, 20 << 20])
def test_gathered_rows_are_reduced_into_a_buffer(numel: int) -> None:
    rows, out = torch.ones(2, numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    with Largest() as largest:
        carriers.reduce_gathered(rows, "SUM", out)
    assert out.eq(2).all() and largest.nbytes <= max(rows.nbytes, 1000)


def test_gathered_rows_need_little_more_memory_than_they_have() -> None:
    rows = torch.ones(2, 20 << 20, dtype=torch.bfloat16)
    with Largest() as largest:
        carriers.reduce_gathered(rows, "SUM")
    assert (
        largest.nbytes == rows.nbytes
    )  # the views of the rows; all of them in float64 are four times as much
