"""Biases as values: what each adds to a score, written out pair by pair, and the form that kernels take."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dilkit import (
    Alibi,
    CoordinateAlibi,
    CoordinateTable,
    GridTable,
    Pattern,
    RelativeTable,
    RowTable,
    alibi_slopes,
    dilated_attention,
    t5_buckets,
)
from dilkit.bias.evaluated import evaluate, gradient
from dilkit.bias.form import BiasForm
from dilkit.op.scores import placed_along, scores_of
from dilkit.oracle import oracle_attention

SLOPES = torch.tensor([0.5, 0.25], dtype=torch.float64)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def clip(x, most):
    return max(-most, min(most, x))


def biases():
    """Biases of 12 rows and two heads, and each as a function of head, query and key."""
    x, table, bent, grid, cube = normal(12, 3), normal(2, 5), normal(2, 4), normal(2, 3, 5), normal(2, 3, 3, 3)
    buckets = torch.tensor([3, 3, 1, 0, 1, 2, 2])
    cells, sums, rows, split = torch.randint(0, 7, (12, 2)), normal(2, 8), normal(1, 2, 12, 5), normal(1, 2, 12, 8)
    axes = range(3)
    return [
        (Alibi(SLOPES), lambda h, i, j: -SLOPES[h] * abs(i - j)),
        (CoordinateAlibi(SLOPES, x), lambda h, i, j: -SLOPES[h] * math.dist(x[i], x[j])),
        (CoordinateAlibi(SLOPES, x, "l1"), lambda h, i, j: -SLOPES[h] * sum(abs(x[i, k] - x[j, k]) for k in axes)),
        (CoordinateAlibi(SLOPES, x, "max"), lambda h, i, j: -SLOPES[h] * max(abs(x[i, k] - x[j, k]) for k in axes)),
        (RelativeTable(table), lambda h, i, j: table[h, clip(i - j, 2) + 2]),
        (RelativeTable(bent, buckets), lambda h, i, j: bent[h, buckets[clip(i - j, 3) + 3]]),
        (GridTable(grid, (3, 4)), lambda h, i, j: grid[h, clip(i // 4 - j // 4, 1) + 1, clip(i % 4 - j % 4, 2) + 2]),
        (GridTable(grid, (3, 4), (1, 2)), lambda h, i, j: grid[h, clip(i // 4 - j // 4, 1) + 1, i % 4 // 2 - j % 4 // 2 + 2]),
        (
            GridTable(cube, (2, 3, 2), (1, 2, 1)),
            lambda h, i, j: cube[h, i // 6 - j // 6 + 1, i // 2 % 3 // 2 - j // 2 % 3 // 2 + 1, i % 2 - j % 2 + 1],
        ),
        (GridTable(table, (12,)), lambda h, i, j: table[h, clip(i - j, 2) + 2]),
        (
            CoordinateTable(sums, cells, (3, 5)),
            lambda h, i, j: sum(sums[h, 3 * k + clip(int(cells[i, k] - cells[j, k]), k + 1) + k + 1] for k in (0, 1)),
        ),
        (RowTable(rows), lambda h, i, j: rows[0, h, i, clip(i - j, 2) + 2]),
        (
            RowTable(split, (4, 3), (3, 5)),
            lambda h, i, j: split[0, h, i, clip(i // 3 - j // 3, 1) + 1] + split[0, h, i, 3 + i % 3 - j % 3 + 2],
        ),
    ]


@pytest.mark.parametrize("number", range(13))
def test_each_bias_is_its_formula_and_its_lowered_form_is_the_same(number):
    bias, formula = biases()[number]
    queries, keys = torch.tensor([11, 0, 4, 7]), torch.arange(12)
    expected = torch.tensor([[[formula(h, i, j) for j in range(12)] for i in queries.tolist()] for h in (0, 1)])
    torch.testing.assert_close(bias.matrix(queries, keys).view(expected.shape), expected)
    lowered = bias.lowered(torch.float64)
    torch.testing.assert_close(evaluate(lowered, queries, keys)[0], expected)
    assert BiasForm.decode(lowered.form.encode()) == lowered.form
    dscores, weights = normal(1 if bias.by_query else 3, 2, 4, 12), lowered.weights.clone().requires_grad_()
    (right,) = torch.autograd.grad(evaluate(lowered._replace(weights=weights), queries, keys), weights, dscores.sum(0)[None])
    torch.testing.assert_close(gradient(lowered, dscores, queries, keys), right)


@pytest.mark.parametrize("number", range(13))
def test_rows_in_another_order_keep_their_positions(number):
    bias, _ = biases()[number]
    order, query = torch.randperm(12), normal(1, 12, 2, 4)
    lowered = placed_along(scores_of(bias, None, query, Pattern.dense(), 2), lambda x: x[:, order], 12).bias
    every = torch.arange(12)
    torch.testing.assert_close(evaluate(lowered, every, every)[0], bias.matrix(order, order).view(2, 12, 12))


@given(heads=st.integers(1, 40))
def test_slopes_fall_from_head_to_head(heads):
    slopes = alibi_slopes(heads)
    power = 2 ** int(math.log2(heads))
    assert len(slopes) == heads
    assert slopes[:power].tolist() == pytest.approx([2 ** (-8 * (h + 1) / power) for h in range(power)])
    assert set(slopes[power:].tolist()) <= set(alibi_slopes(2 * power).tolist()), "those between the others"


@given(
    halves=st.integers(2, 16),
    most=st.integers(17, 200),
    bidirectional=st.booleans(),
    apart=st.integers(-300, 300),
)
@settings(max_examples=30)
def test_buckets_are_single_distances_and_then_logarithms(halves, most, bidirectional, apart):
    count = 2 * halves
    buckets = t5_buckets(count, most, bidirectional=bidirectional)
    found = int(buckets[clip(apart, most) + most])
    own = halves if bidirectional else count
    distance = abs(apart) if bidirectional else max(apart, 0)
    exact = own // 2
    if distance >= exact:
        far = math.log(min(distance, most) / exact) / math.log(most / exact) * (own - exact)
        allowed = {min(own - 1, exact + int(far + slack)) for slack in (-1e-5, 1e-5)}  # buckets are of fp32 logarithms
    else:
        allowed = {distance}
    assert found - own * (bidirectional and apart < 0) in allowed


def test_the_heads_of_a_shard_have_the_weights_of_their_place():
    pattern = Pattern([8, 16], [1, 2])
    q, k, v = normal(1, 16, 8, 4), normal(1, 16, 4, 4), normal(1, 16, 4, 4)
    slopes = torch.rand(8, dtype=torch.float64)
    whole = dilated_attention(q, k, v, pattern, bias=Alibi(slopes), backend="reference")
    own = Pattern([8, 16], [1, 2], head_shard=(1, 4))
    for given_slopes in (slopes, slopes[2:6]):  # of the model, and of these heads alone
        part = dilated_attention(q[:, :, 2:6], k[:, :, 1:3], v[:, :, 1:3], own, bias=Alibi(given_slopes), backend="reference")
        torch.testing.assert_close(part, whole[:, :, 2:6])
    with pytest.raises(ValueError, match=r"slopes of the bias is of 5 heads; the 4 heads of query are needed, or of all 8"):
        dilated_attention(q[:, :, 2:6], k[:, :, 1:3], v[:, :, 1:3], own, bias=Alibi(slopes[:5]))


def test_without_weights_that_learn_the_others_still_have_gradients():
    q, k, v = (normal(2, 20, 2, 4).requires_grad_() for _ in range(3))
    bias, pattern = Alibi(SLOPES), Pattern([8], [2])
    calls = (
        dilated_attention(q, k, v, pattern, bias=bias, softcap=2.0, backend="reference"),
        oracle_attention(q, k, v, pattern, bias=bias, softcap=2.0)[0],
    )
    ours, right = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in calls)
    torch.testing.assert_close(ours, right)


def test_only_the_weights_learn():
    q, k, v = (normal(1, 20, 2, 4) for _ in range(3))
    table = normal(2, 7).requires_grad_()
    calls = (
        dilated_attention(q, k, v, Pattern.dense(), bias=RelativeTable(table), backend="reference"),
        oracle_attention(q, k, v, Pattern.dense(), bias=RelativeTable(table))[0],
    )
    ours, right = (torch.autograd.grad(out.sin().sum(), table) for out in calls)
    torch.testing.assert_close(ours, right)
