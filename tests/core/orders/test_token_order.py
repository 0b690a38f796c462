"""Token orders as values."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch

from dilkit import TokenOrder, order, plan
from dilkit.environment import CACHE_BYTES
from dilkit.orders.checks import CURVES
from dilkit.orders.curves import chosen_tile
from dilkit.orders.operators import reorder_op
from dilkit.plan import ENTRY_BYTES

SHAPES = [(1,), (7,), (1, 1), (1, 9), (9, 1), (8, 8), (5, 8), (12, 10), (1, 1, 1), (4, 4, 4), (3, 4, 5), (2, 1, 7)]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=["x".join(map(str, shape)) for shape in SHAPES])
GIVEN = TokenOrder.from_permutation([3, 0, 2, 1, 4], extra_tokens=2)
TORCH_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _empty_cache():
    plan.cache_clear()


@EACH_SHAPE
def test_an_order_is_a_permutation_of_cells_and_its_inverse_with_the_extra_tokens_in_front(shape):
    for curve, extra in product(CURVES, (0, 2)):
        made = order(shape, curve, extra_tokens=extra)
        n = extra + int(np.prod(shape))
        assert len(made) == len(made.perm) == n
        assert sorted(made.perm) == list(range(n))
        assert made.perm[made.rank].tolist() == made.rank[made.perm].tolist() == list(range(n))
        assert made.perm[:extra].tolist() == list(range(extra))
        assert made.perm[extra] == extra, curve  # the first cell
        found = made.coordinates()
        assert found.shape == (n - extra, len(shape))
        assert np.array_equal(np.ravel_multi_index(tuple(found.T), shape) + extra, made.perm[extra:]), curve


@EACH_SHAPE
def test_a_transposed_order_runs_through_the_reversed_grid(shape):
    for curve in CURVES:
        made = order(shape, curve, extra_tokens=1)
        turned = made.transposed()
        assert turned.shape == made.shape
        assert turned.transposed() == made
        tile = None if made.tile is None else made.tile[::-1]
        assert np.array_equal(turned.coordinates(), order(shape[::-1], curve, tile=tile).coordinates()[:, ::-1]), curve
        assert sorted(turned.perm) == list(range(len(made)))


def test_which_hilbert_curve_is_said():
    variants = [order(shape).variant for shape in ((8, 8), (4, 4, 4), (8, 4), (6, 6), (7,))]
    assert variants == ["true", "true", "generalised", "generalised", None]
    assert order((8, 8), "morton").variant is None


@pytest.mark.parametrize(("made", "identity"), [
    (order((5, 7), "row-major"), True), (order((9,)), True), (order((1, 9)), True), (order((6, 1), "snake"), True),
    (order((4, 4), "tile", tile=(4, 4)), True), (order((4, 4), "tile", tile=(1, 4)), True), (order((8, 8)), False),
    (order((3, 100), "snake"), False), (order((3, 4), "row-major").transposed(), False), (order((1, 300), "morton"), True),
], ids=str)  # fmt: skip
def test_the_identity_is_told(made, identity):
    assert made.is_identity is identity
    assert made.is_identity == np.array_equal(made.perm, np.arange(len(made)))


@pytest.mark.parametrize(("shape", "tile"), [
    ((64, 64), (8, 8)), ((1080, 1920), (8, 8)), ((33, 45, 80), (3, 5, 4)), ((37, 41), (8, 8)), ((5, 100), (5, 10)),
    ((90, 160), (9, 8)), ((2, 64, 64), (2, 4, 4)), ((100,), (50,)),
])  # fmt: skip
def test_a_tile_is_chosen_and_said(shape, tile):
    assert order(shape, "tile").tile == chosen_tile(shape) == tile
    assert order(shape, "tile") == order(shape, "tile", tile=tile)
    assert order(shape).tile is None


@pytest.mark.parametrize("x", [np.arange(66).reshape(3, 22), torch.arange(66).view(3, 22)], ids=["array", "tensor"])
def test_apply_and_restore(x):
    made = order((4, 5), extra_tokens=2)
    moved = made.apply(x)
    assert np.array_equal(np.asarray(moved), np.asarray(x)[:, made.perm])
    assert type(moved) is type(x)
    assert np.array_equal(np.asarray(made.restore(moved)), np.asarray(x))
    assert np.array_equal(np.asarray(made.apply(x.T, dim=0)), np.asarray(moved.T))
    assert np.array_equal(np.asarray(made.restore(moved.T, dim=-2)), np.asarray(x.T))


def test_arrays_cannot_be_written_to():
    made = order((8, 8))
    for array in (made.perm, made.rank, GIVEN.perm, GIVEN.rank):
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_orders_are_values():
    made = order((6, 8), "snake", extra_tokens=1)
    assert made == order([6, np.int64(8)], "snake", extra_tokens=1)
    others = [order((6, 8), "snake"), order((8, 6), "snake", extra_tokens=1), order((6, 8), extra_tokens=1), GIVEN, None]
    others += [made.transposed(), order((6, 8), "snake", extra_tokens=1, is_generation_order=True)]
    assert made not in others
    assert len({made, order((6, 8), "snake", extra_tokens=1), *others}) == 1 + len(others)
    assert copy.deepcopy(made) is made
    with pytest.raises(AttributeError):
        made.curve = "hilbert"


def test_an_order_that_is_changed_is_another_one():
    hilbert, rows, backward = order((4, 4)), np.arange(16), np.arange(16)[::-1].copy()
    turned = dataclasses.replace(hilbert, perm=backward)
    assert turned != hilbert
    assert turned.restore(turned.apply(rows, 0), 0).tolist() == rows.tolist()
    generated = dataclasses.replace(order((4, 4), "tile", tile=(2, 2), extra_tokens=1), is_generation_order=True)
    assert generated != order((4, 4), "tile", tile=(2, 2), extra_tokens=1)
    copied = pickle.loads(pickle.dumps(generated))
    assert copied == generated
    assert (copied.is_generation_order, copied.tile, copied.extra_tokens) == (True, (2, 2), 1)
    assert TokenOrder((2, 8), "given", backward) != TokenOrder((4, 4), "given", backward)
    assert repr(TokenOrder((2, 8), "given", backward)) == "<TokenOrder of 2 x 8 points, curve='given'>"


def test_an_order_of_a_grid_travels_as_what_it_is_made_from():
    made = order((64, 64), "tile", extra_tokens=1, is_generation_order=True).transposed()
    text = pickle.dumps(made)
    plan.cache_clear()
    again = pickle.loads(text)
    assert len(text) < 300
    assert again is not made
    assert again == made
    assert hash(again) == hash(made)
    assert np.array_equal(again.perm, made.perm)
    assert repr(again) == "order((64, 64), 'tile', tile=(8, 8), extra_tokens=1, is_generation_order=True).transposed()"


def test_a_given_permutation_is_an_order():
    assert GIVEN.perm.tolist() == [0, 1, 5, 2, 4, 3, 6]
    again = pickle.loads(pickle.dumps(GIVEN))
    assert again == copy.copy(GIVEN) == GIVEN
    assert hash(again) == hash(GIVEN)
    assert again.rank.tolist() == GIVEN.rank.tolist()
    assert TokenOrder.from_permutation([3, 0, 2, 4, 1], extra_tokens=2) != GIVEN
    assert TokenOrder.from_permutation(range(5)).is_identity
    with pytest.raises(ValueError, match="has no grid to transpose"):
        GIVEN.transposed()


def test_the_wrong_length_names_both_and_the_extra_tokens():
    made = order((4, 4))
    with pytest.raises(
        ValueError, match=r"x has 17 tokens along dim 1, but the order is of 16.*extra_tokens=1 would leave 1 in front"
    ):
        made.apply(torch.zeros(2, 17))
    with pytest.raises(ValueError, match=r"x has 16 tokens along dim 0, but the order is of 18.*extra_tokens=0 fits"):
        order((4, 4), extra_tokens=2).restore(np.zeros(16), dim=0)
    with pytest.raises(ValueError, match=r"x has 5 tokens .* use an order of these tokens: of the grid"):
        made.apply(torch.zeros(2, 5))


def test_an_order_is_made_once_and_its_bytes_are_counted():
    made = order((16, 16))
    first = plan.cache_info()
    assert (first.misses, first.bytes) == (1, 256 * 4 + ENTRY_BYTES)
    assert order([16, 16], "hilbert") is made
    assert made.rank is made.rank
    device = torch.device("meta")
    assert made.index(device) is made.index(device)
    assert made.index(device, inverse=True) is not made.index(device)
    after = plan.cache_info()
    assert (after.misses, after.entries, after.bytes) == (4, 4, 4 * (256 * 4 + ENTRY_BYTES))


def test_the_cache_is_bounded_and_can_be_off(monkeypatch):
    monkeypatch.setenv(CACHE_BYTES.name, str(3 * (256 * 4 + ENTRY_BYTES)))
    for columns in range(1, 17):
        made = order((16, columns))
        assert np.array_equal(made.restore(made.apply(np.arange(len(made)), 0), 0), np.arange(len(made)))
        assert plan.cache_info().bytes <= 3 * (256 * 4 + ENTRY_BYTES)
    monkeypatch.setenv(CACHE_BYTES.name, "0")
    made = order((16, 16), "snake")
    x = torch.randn(1, 256, requires_grad=True)
    assert torch.equal(made.restore(made.apply(x)), x)
    assert plan.cache_info().entries == 0


def test_points_leave_nothing_in_the_cache():
    GIVEN.restore(GIVEN.apply(torch.randn(2, 7)))
    GIVEN.index(torch.device("meta"))
    assert plan.cache_info().entries == 0


@pytest.mark.parametrize("shape", [(1, 7), (1, 7, 2), (1, 7, 0), (1, 1, 7, 2, 3), (2, 7, 2), (7, 3)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_rows_move_as_torch_moves_them(shape, contiguous):
    x = torch.randn(shape) if contiguous else torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    dim = shape.index(7)
    expected = x.index_select(dim, torch.from_numpy(GIVEN.perm.copy()))
    assert torch.equal(GIVEN.apply(x, dim), expected)
    assert torch.equal(GIVEN.apply(x, dim - x.dim()), expected)
    assert torch.equal(GIVEN.restore(expected, dim), x)


def test_orders_need_no_torch():
    code = "import sys; from dilkit import order; order((8, 8)).transposed().rank; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BOTH = pytest.mark.parametrize(
    "made", [order((4, 4), extra_tokens=1), TokenOrder.from_permutation(range(16, -1, -1))], ids=["grid", "given"]
)


@BOTH
def test_gradients_are_moved_back(made):
    x = torch.randn(2, 17, 3, dtype=torch.float64, requires_grad=True)
    for move in (made.apply, made.restore):
        torch.autograd.gradcheck(move, x)
        torch.autograd.gradgradcheck(move, x)
    (grad,) = torch.autograd.grad(made.apply(x), x, made.apply(x))
    assert torch.equal(grad, x)


@BOTH
@TORCH_WARNS
def test_functional_transforms(made):
    x = torch.randn(2, 17, 3, requires_grad=True)
    moved = made.apply(x)
    assert torch.equal(torch.func.vmap(lambda row: made.apply(row, 0))(x), moved)
    assert torch.equal(torch.func.vmap(made.apply, in_dims=2, out_dims=2)(x), moved)
    assert torch.equal(torch.func.jvp(made.apply, (x,), (x,))[1], moved)
    grad = torch.func.vmap(torch.func.grad(lambda row: made.apply(row, -2).pow(3).sum()))(x)
    torch.testing.assert_close(grad, 3 * x.detach() ** 2)


@BOTH
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled(made, dynamic):
    def call(x):
        return made.apply(x.sin()) * 2 + made.restore(x, -2)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x = torch.randn(2, 17, 3, requires_grad=True)
    plain, out = call(x), compiled(x)
    assert torch.equal(plain, out)
    weight = torch.randn_like(x)
    torch.testing.assert_close(torch.autograd.grad(out, x, weight), torch.autograd.grad(plain, x, weight))
    vmapped = torch.compile(torch.func.vmap(lambda x: made.apply(x, 0)), fullgraph=True, backend="aot_eager")
    assert torch.equal(vmapped(x.detach()), made.apply(x))


@TORCH_WARNS
def test_the_operator_of_compiled_graphs():
    made = order((4, 4))
    for x in (torch.randn(2, 16), torch.randn(16, 2, requires_grad=True)):
        torch.library.opcheck(reorder_op, (x, x.shape.index(16), made.text, True))


def test_a_table_made_in_inference_mode_serves_training():
    made = order((4, 4))
    with torch.inference_mode():
        made.apply(torch.randn(2, 16))
    x = torch.randn(2, 16, requires_grad=True)
    made.restore(made.apply(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_fake_tensor_leaves_no_fake_table():
    from torch._subclasses import FakeTensorMode

    made = order((4, 4))
    with FakeTensorMode():
        assert made.apply(torch.empty(2, 16)).shape == (2, 16)
    assert made.apply(torch.arange(16), 0).tolist() == made.perm.tolist()
