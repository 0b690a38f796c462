"""Plans of calls that are kept."""

import random
from unittest import mock

import pytest
import torch
from helpers.sdpa import LONGNET, TorchRows

from dilkit import GlobalTokens, Pattern, SlidingWindow, plan
from dilkit.backends.sdpa import call_plan
from dilkit.backends.sdpa.backend import SDPA
from dilkit.inputs import Inputs
from dilkit.problem import Problem

BATCH, SEQ, HEADS, WIDTH = 2, 128, 4, 8
SIZES = BATCH, SEQ, HEADS, WIDTH
LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "side by side": lambda x: torch.cat([x, x.neg(), x], -1)[..., :WIDTH],
    "later rows": lambda x: torch.cat([x.neg(), x], 1)[:, SEQ:],
    "later heads": lambda x: torch.cat([x.neg(), x, x], 2)[:, :, HEADS : 2 * HEADS],
    "one sequence": lambda x: x[:1].expand(SIZES),
}
OPTIONS = [
    dict(),
    dict(is_causal=True),
    dict(dtype=torch.bfloat16),
    dict(pattern=Pattern([16, 96], [1, 4], offset="block")),
    dict(pattern=Pattern.of(SlidingWindow(9), GlobalTokens(2))),
    dict(kv_heads=2),
    dict(scale=-0.5),
    dict(masked=True),
]


def results(backend, layouts, options, copied=False):
    """Compute `out`, `lse` and gradients of query, key, value and dout in these layouts, or of contiguous copies."""
    given = dict(pattern=LONGNET, dtype=torch.float32, kv_heads=HEADS, masked=False) | options
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(4, *SIZES, generator=generator).to(given.pop("dtype")).unbind()
    laid_out = [LAYOUTS[layout](x) for layout, x in zip(layouts, numbers, strict=True)]
    q, k, v, dout = (x.clone(memory_format=torch.contiguous_format) for x in laid_out) if copied else laid_out
    kv_heads = given.pop("kv_heads")
    mask = torch.rand(BATCH, SEQ, generator=generator) < 0.4 if given.pop("masked") else None
    inputs = Inputs(q, k[:, :, :kv_heads], v[:, :, -kv_heads:], key_padding_mask=mask)
    posed = Problem.of(inputs.query, inputs.key, **given, key_padding_mask=mask is not None, requires_grad=True)
    out, lse = backend.forward(inputs, posed)
    return out, lse, *backend.backward(dout, inputs, out, lse, posed)


@pytest.mark.parametrize("rows", [None, TorchRows()], ids=["eager", "fused"])
def test_calls_in_any_turns_compute_what_each_computes_alone(rows):
    draw, backend = random.Random(5), SDPA(row_kernels=rows)
    calls = [(tuple(draw.choices(list(LAYOUTS), k=4)), options) for options in OPTIONS for _ in range(3)]
    alone = []
    for call in calls:
        plan.cache_clear()
        alone.append(results(SDPA(row_kernels=rows), *call))
        bound = 64 * torch.finfo(alone[-1][0].dtype).eps
        for found, right in zip(alone[-1], results(SDPA(row_kernels=rows), *call, copied=True), strict=True):
            torch.testing.assert_close(found, right, rtol=bound, atol=bound)
    for at in draw.choices(range(len(calls)), k=3 * len(calls)):
        found = results(backend, *calls[at])
        assert all(torch.equal(x, y) for x, y in zip(found, alone[at], strict=True)), calls[at]


def test_a_plan_is_kept_for_its_strides_and_serves_every_place():
    backend = SDPA()
    plan.cache_clear()
    with mock.patch.object(call_plan, "_planned", wraps=call_plan._planned) as made:
        for layout in ("contiguous", "one sequence", "contiguous", "heads first"):
            results(backend, (layout,) * 4, {})
    assert made.call_count == 2 * 3, "a forward and a backward pass for each of three layouts"
