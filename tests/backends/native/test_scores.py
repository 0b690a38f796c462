"""Scales, biases and softcaps of the CPU kernel."""

import pytest
import torch

from dilkit import Alibi, CoordinateAlibi, GridTable, Pattern, Problem, RelativeTable, RowTable, dilated_attention
from dilkit.backends.native.backend import Native
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.inputs import Inputs
from dilkit.pattern import GlobalTokens, Neighborhood, SlidingWindow
from dilkit.threads import torch_threads

PATTERN = Pattern([128, 600], [1, 4])


def normal(*shape):
    return torch.randn(shape)


def results(bias, seq=600, backend="native", **options):
    torch.manual_seed(1)
    q, k, v = (normal(1, seq, 2, 16).requires_grad_() for _ in range(3))
    weights = bias.weights.detach().requires_grad_()
    out = dilated_attention(q, k, v, PATTERN, bias=bias.with_weights(weights), backend=backend, **options)
    return [out, *torch.autograd.grad(out.sin().sum(), (q, weights))]


@pytest.mark.parametrize("kind", ["alibi", "coordinates", "table", "rows"])
def test_threads_change_no_bit(kind):
    slopes = torch.tensor([0.01, 0.1])
    biases = {
        "alibi": Alibi(slopes),
        "coordinates": CoordinateAlibi(slopes, normal(600, 2)),
        "table": RelativeTable(normal(2, 65)),
        "rows": RowTable(normal(1, 2, 600, 33)),
    }
    found = []
    for count in (1, 2, 5):
        with torch_threads(count):
            found.append(results(biases[kind], softcap=3.0))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1e-50])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(softcap=2.0), dict(bias=Alibi(torch.tensor([0.01, 0.1])))])
@pytest.mark.parametrize(
    "pattern", [PATTERN, Pattern.of(Neighborhood((20, 30), 5)), Pattern.of(SlidingWindow(40), GlobalTokens(2), tail="zeros")]
)
def test_a_scale_that_is_not_above_0(pattern, options, scale):
    """float32 decides: the greatest product is not the greatest score, or -inf times the scale is NaN."""
    torch.manual_seed(2)
    found = []
    q, k, v, dout = (normal(1, 600, 2, 16) for _ in range(4))
    for backend in ("native", "reference"):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = dilated_attention(*tensors, pattern, scale=scale, backend=backend, return_lse=True, **options)
        found.append([out, lse, *torch.autograd.grad(out, tensors, dout)])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_the_gradient_of_a_table_too_large_for_parts_is_summed_in_one():
    """A number for each of 129 x 129 x 129 offsets and four parts would be more than `MOST_PARTS`."""
    table = GridTable(normal(2, 129, 129, 129), (8, 8, 10))
    for ours, right in zip(results(table), results(table, backend="reference"), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "positions", "told"),
    [
        (torch.zeros(3, 1), torch.zeros(1, 30, 2), r"weights of the bias have shape \(3, 1\); \(2, 1\)"),
        (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(1, 30, 2), "weights of the bias"),
        (torch.zeros(2, 2)[:, ::2], torch.zeros(1, 30, 2), "weights of the bias"),
        (torch.zeros(2, 1), torch.zeros(1, 29, 2), r"positions have shape \(1, 29, 2\); \(1 or 1, 30, 2\)"),
        (torch.zeros(2, 1), torch.zeros(1, 30, 3), "positions have shape"),
        (torch.zeros(2, 1), torch.zeros(1, 60, 2)[:, ::2], "positions have shape"),
    ],
)
def test_tensors_of_a_bias_that_do_not_fit_are_refused_where_their_addresses_are_taken(weights, positions, told):
    form = BiasForm(dims=2, metric="euclidean", placed=True)
    x = normal(1, 30, 2, 8)
    problem = Problem.of(x, x, Pattern.dense(), bias=form)
    with pytest.raises(ValueError, match=told):
        Native().forward(Inputs(x, x, x, bias=LoweredBias(form, weights, positions)), problem)
    with pytest.raises(ValueError, match="bias is missing"):
        Native().forward(Inputs(x, x, x), problem)
