"""Codes of points against Skilling's transform and interleaved bits, by every instruction set there is; sorting by them."""

from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch
from core.orders.definitions import interleaved, skilling
from helpers.pairwise import all_but
from hypothesis import example, given, settings, strategies as st

from dilkit import environment
from dilkit.orders import _points
from dilkit.orders.points import CURVES, MAX_BITS, decode, encode, instruction_set, sort_points

COUNTS = (0, 1, 7, 63, 64, 65, 509, 512, 513, 1031)
DTYPES = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)
MIDDLE = DTYPES[2:6]


@pytest.fixture(params=_points.instruction_sets())
def isa(request, monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", request.param)
    return request.param


ORACLES = {"hilbert": skilling, "morton": interleaved}


def some_points(ndim, bits, count):
    points = np.random.default_rng(bits * 7 + ndim).integers(0, 2**bits, (count, ndim))
    points[: min(count, 1)] = 2**bits - 1
    points[1:2] = 0
    return points


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("ndim", MAX_BITS)
def test_codes_are_those_of_the_definition(isa, curve, ndim):
    for bits in range(1, MAX_BITS[ndim] + 1):
        points = some_points(ndim, bits, 67)
        codes = encode(points, bits, curve)
        assert codes.tolist() == ORACLES[curve](points, bits), bits
        assert np.array_equal(decode(codes, ndim, bits, curve), points), bits


@pytest.mark.parametrize("ndim", MAX_BITS)
def test_nothing_but_the_result_is_written(isa, ndim):
    for count in COUNTS:
        written_within(ndim, count)


def written_within(ndim, count):
    points = some_points(ndim, 9, count)
    guarded = np.full(count + 128, 77, np.uint32)
    codes = encode(points, 9, out=guarded[64 : count + 64])
    assert (guarded[:64] == 77).all()
    assert (guarded[count + 64 :] == 77).all()
    assert codes.tolist() == skilling(points, 9)
    for dtype in (np.uint16, np.int32, np.int64):
        room = np.full((count + 128, ndim), 77, dtype)
        assert np.array_equal(decode(codes, ndim, 9, out=room[64 : count + 64]), points)
        assert (room[:64] == 77).all()
        assert (room[count + 64 :] == 77).all()


@pytest.mark.parametrize("dtype", all_but(MIDDLE, DTYPES), ids=lambda dtype: np.dtype(dtype).name)
def test_any_dtype_and_any_strides(isa, dtype):
    bits = min(int(np.iinfo(dtype).max).bit_length(), 20)
    points = some_points(3, bits, 131).astype(dtype)
    expected = skilling(points, bits)
    wide = np.zeros((3, 262, 5), dtype)
    wide[:, ::2, 1] = points.T
    backward = np.ascontiguousarray(points[::-1])[::-1]
    bytewise = np.zeros(131, np.dtype([("pad", "u1"), ("point", dtype, 3)]))
    bytewise["point"] = points
    for layout in (points, np.asfortranarray(points), tuple(points.T), wide[:, ::2, 1].T, backward, bytewise["point"]):
        assert encode(layout, bits).tolist() == expected
    assert encode(points.astype(points.dtype.newbyteorder(">")), bits).tolist() == expected
    back = np.zeros((3, 262, 5), dtype)
    decode(encode(points, bits), 3, bits, out=tuple(back[:, ::2, 1]))
    assert np.array_equal(back, wide)
    bytewise["point"] = 0
    decode(encode(points, bits), 3, bits, out=bytewise["point"])
    assert np.array_equal(bytewise["point"], points)
    assert not bytewise["pad"].any()


def test_codes_in_any_dtype(isa):
    points = some_points(2, 4, 99)
    for dtype in DTYPES[2:] + DTYPES[:1]:
        codes = np.zeros(198, dtype)[::2]
        assert encode(points, 4, out=codes) is codes
        assert codes.tolist() == skilling(points, 4)
        assert np.array_equal(decode(codes, 2, 4), points)
    assert encode(points, 16).dtype == np.uint32
    assert encode(points, 17).dtype == np.int64


def test_results_may_overwrite_what_they_come_from(isa):
    points, memory = some_points(2, 9, 1500), np.zeros(3200, np.int64)
    codes = encode(points, 9)
    for first in (0, 100, 1500):
        memory[:1500] = points[:, 0]
        assert np.array_equal(encode((memory[:1500], points[:, 1]), 9, out=memory[first : first + 1500]), codes)
        memory[:1500] = codes
        y = np.zeros(1500, np.int64)
        assert np.array_equal(decode(memory[:1500], 2, 9, out=(memory[first : first + 1500], y))[0], points[:, 0])


def test_tensors(isa):
    points = torch.from_numpy(some_points(3, 10, 77))
    codes = encode(points)
    assert isinstance(codes, torch.Tensor)
    assert (codes.dtype, encode(points, 11).dtype) == (torch.int32, torch.int64)
    assert codes.tolist() == skilling(points.numpy(), 10)
    assert torch.equal(decode(codes, 3, 10), points.int())
    assert torch.equal(encode(tuple(points.T)), codes)
    out = torch.empty(77, dtype=torch.int64)
    assert encode(points, out=out) is out
    assert torch.equal(out, codes.long())


def test_bits_are_those_of_the_largest_coordinate():
    points = np.array([[0, 0], [5, 1], [2, 3]])
    assert np.array_equal(encode(points), encode(points, 3))
    assert encode(np.zeros((4, 3), int)).tolist() == [0] * 4
    assert encode(np.zeros((0, 3), int)).shape == (0,)


@pytest.mark.parametrize(
    ("at", "value", "hint"), [(0, 16, "bits=5"), (700, 2**40, "bits=41"), (1030, -1, "subtract the least coordinates")]
)
def test_a_coordinate_out_of_range_is_named(isa, at, value, hint):
    points = some_points(3, 4, 1031)
    points[at, 1] = value
    with pytest.raises(ValueError, match=rf"coords\[{at}\]=\(\d+, {value}, \d+\) is out of range: bits=4 .*{hint}"):
        encode(points, 4)


def test_the_highest_bit_of_a_signed_dtype_is_no_coordinate(isa):
    with pytest.raises(ValueError, match="out of range"):
        encode(np.array([[1, -1]], np.int8), 8)
    assert encode(np.array([[255, 255]], np.uint8), 8).tolist() == skilling(np.array([[255, 255]]), 8)


def test_a_code_out_of_range_is_named(isa):
    codes = np.arange(600)
    codes[599] = 1024
    with pytest.raises(ValueError, match=r"codes\[599\]=1024 is out of range: bits=5 in 2-D give 0 to 1023"):
        decode(codes, 2, 5)


def test_an_instruction_set_is_chosen(monkeypatch):
    monkeypatch.delenv("DILKIT_CPU_ISA", raising=False)
    best = _points.instruction_sets()[0]
    assert instruction_set() == best
    monkeypatch.setenv("DILKIT_CPU_ISA", "generic")
    assert instruction_set() == "generic"
    for name in environment.BF16_SETS if best == "avx512" else ():
        monkeypatch.setenv("DILKIT_CPU_ISA", name)
        assert instruction_set() == "avx512"


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("ndim", MAX_BITS)
def test_points_are_sorted_by_their_codes(curve, ndim):
    for bits, count in ((1, 50), (3, 999), (9, 4097), (20, 3001)):
        points = some_points(ndim, bits, count)
        order = sort_points(points - 5, curve)
        assert order.perm.tolist() == np.argsort(encode(points, bits, curve), kind="stable").tolist()
        assert np.array_equal(order.rank[order.perm], np.arange(count))
        assert (order.shape, order.curve, len(order)) == ((count,), curve, count)
        assert not order.perm.flags.writeable
        assert np.array_equal(order.restore(order.apply(points, 0), 0), points)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 3), max_size=60), st.integers(0, 63))
@example([], 0)
@example([2**63 - 1, 0], 0)
@example([2**61, 1], 0)
def test_codes_are_sorted_stably(codes, shift):
    for dtype in (np.int64, np.uint32):
        array = (np.array(codes, np.int64) >> shift).astype(dtype)
        for index in (np.int32, np.int64):
            perm = np.empty(len(array), index)
            _points.argsort(array, perm)
            assert perm.tolist() == np.argsort(array, kind="stable").tolist()


def test_many_wide_codes_are_sorted():
    codes = np.random.default_rng(0).integers(0, 2**63, 70001)
    perm = np.empty(len(codes), np.int32)
    _points.argsort(codes, perm)
    assert np.array_equal(perm, np.argsort(codes, kind="stable"))


def test_floating_point_clouds_are_sorted_by_cells():
    cloud = np.random.default_rng(0).normal(size=(3000, 3)).astype(np.float32)
    cells = np.floor((cloud - cloud.min(0)) / 0.1).astype(int)
    expected = np.argsort(encode(cells), kind="stable")
    assert np.array_equal(sort_points(cloud, cell=0.1).perm, expected)
    assert np.array_equal(sort_points(torch.from_numpy(cloud), cell=0.1).perm, expected)
    assert np.array_equal(sort_points(tuple(cloud.T), cell=0.1).perm, expected)


def exact_order(points, cell):
    axes = [[Fraction(x) for x in axis] for axis in points.T.tolist()]
    cells = [[floor((x - min(axis)) / Fraction(cell)) for x in axis] for axis in axes]
    return np.argsort(encode(np.array(cells).T), kind="stable").tolist()


@pytest.mark.parametrize("dtype", all_but(MIDDLE, DTYPES), ids=lambda dtype: np.dtype(dtype).name)
def test_whole_coordinates_are_counted_in_cells_exactly(dtype):
    limits, rng = np.iinfo(dtype), np.random.default_rng(3)
    for low, high in ((limits.min, limits.max), (limits.max - 100, limits.max), (limits.min, limits.min + 100)):
        points = rng.integers(low, high, (60, 2), dtype, endpoint=True)
        points[:2] = [[low], [high]]
        for cell in (float(high - low) / 4 + 0.5, (high - low) // 97 + 1, float((high - low) // 9 + 1), 2.0**70, 2**64):
            assert sort_points(points, cell=cell).perm.tolist() == exact_order(points, cell), (low, cell)
    few = rng.integers(0, 100, (60, 2)).astype(dtype)
    assert sort_points(few, cell=0.125).perm.tolist() == exact_order(few, 0.125)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_cells_of_floats_are_counted_in_double_precision(dtype):
    rng = np.random.default_rng(4)
    most = 0.999 * min(float(np.finfo(dtype).max), 1e7)
    for low, high, cells in ((-most, most, 1021.7), (most / 2, most, 173.3), (-1e-3, 1e-3, 11.1), (-most, most, 2.0**22.7)):
        points = (low + (high - low) * rng.random((100, 2))).astype(dtype)
        cell = (high - low) / cells
        assert sort_points(points, cell=cell).perm.tolist() == exact_order(points, cell), (low, high)
    far_apart = (most - 300 * rng.random((300, 2))).astype(dtype)
    far_apart[0] = -most
    assert sort_points(far_apart, cell=0.75).perm.tolist() == exact_order(far_apart, 0.75)


def test_clouds_of_a_batch_follow_each_other():
    points, batch = some_points(3, 8, 900), np.random.default_rng(1).integers(0, 5, 900)
    order = sort_points(points, batch=batch)
    expected = [
        i
        for cloud in range(5)
        for i in np.flatnonzero(batch == cloud)[np.argsort(encode(points[batch == cloud], 8), kind="stable")]
    ]
    assert order.perm.tolist() == expected


def test_no_points():
    assert len(sort_points(np.zeros((0, 3), int))) == 0
    assert len(sort_points(np.zeros((0, 2)), cell=0.5, batch=np.zeros(0, int))) == 0
