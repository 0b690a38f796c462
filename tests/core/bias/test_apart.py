"""Rows with two positions, one as a query and one as a key, as ranks compute with: every backend that takes them."""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

import pytest
import torch
from helpers.backends_here import on
from helpers.calls import encode_call
from torch import Tensor

from dilkit import Pattern, SlidingWindow
from dilkit.bias.base import Bias
from dilkit.bias.form import APART, METRICS, BiasForm, LoweredBias
from dilkit.op.operators import backward_op, forward_op
from dilkit.oracle import oracle_attention
from dilkit.registry import backends

BUILT = {"native": find_spec("dilkit.backends.native._native") is not None}
BACKENDS = [name for name in on("cpu") if APART in backends()[name].limits.biases and BUILT.get(name, True)]
FORMS = [
    BiasForm(placed=True, apart=True, learned=True),
    *(BiasForm(3, metric=metric, placed=True, apart=True, learned=True) for metric in METRICS),
    BiasForm(2, metric="l1", placed=True, apart=True, learned=True, neutral=True),
    BiasForm(sizes=(9,), placed=True, apart=True, learned=True),
    BiasForm(2, (5, 7), placed=True, apart=True, learned=True),
]
PATTERNS = {
    "segments": (Pattern([8, 24], [1, 3]), False),
    "causal": (Pattern.dense(), True),
    "window": (Pattern.of(SlidingWindow(3, 2)), False),
}
HEADS, SEQ = 4, 37


@dataclass(frozen=True, eq=False)
class PairsOfPositions(Bias):
    form: BiasForm
    table: Tensor
    positions: Tensor
    weights_name: ClassVar[str] = "table"

    def matrix(self, queries, keys):
        of_query, of_key = self.positions[:, :, : self.form.dims], self.positions[:, :, self.form.dims :]
        apart = of_query[:, queries].unsqueeze(2) - of_key[:, keys].unsqueeze(1)
        if self.form.sizes:
            most = torch.tensor([size // 2 for size in self.form.sizes])
            entry = (apart.long().maximum(-most).minimum(most) + most).unbind(-1)
            return self.table.unflatten(1, self.form.sizes)[(slice(None), *entry)].transpose(0, 1)
        order = {"euclidean": 2.0, "l1": 1.0, "max": float("inf")}[self.form.metric]
        distance = torch.linalg.vector_norm(apart, order, dim=-1).nan_to_num(nan=0.0)
        return -self.table[:, 0, None, None] * distance.unsqueeze(1)

    def lowered(self, dtype):
        return LoweredBias(self.form, self.table.to(dtype), self.positions.to(dtype))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_positions_of_queries_and_keys(name, pattern, form):
    generator = torch.Generator().manual_seed(0)
    shown, is_causal = PATTERNS[pattern]
    rows = [torch.randn(2, SEQ, heads, 8, dtype=torch.float64, generator=generator) for heads in (HEADS, 2, 2, HEADS)]
    table = torch.randn(HEADS, form.entries, dtype=torch.float64, generator=generator)
    positions = torch.randint(-6, 7, (2, SEQ, form.columns), generator=generator).double()
    if form.neutral:
        positions[:, ::5] = math.nan
    leaves = [x.requires_grad_() for x in (*rows[:3], table)]
    out, lse = oracle_attention(*rows[:3], shown, is_causal=is_causal, bias=PairsOfPositions(form, table, positions))
    expected = torch.autograd.grad(out, leaves, rows[3])
    with torch.no_grad():
        call = encode_call(shown, is_causal, True, name, bias=form)
        options = rows[0].shape[-1] ** -0.5, call
        its_out, its_lse = forward_op(*rows[:3], None, *options, None, None, None, None, table, positions)
        further = None, None, None, None, table, positions
        gradients = backward_op(rows[3], *rows[:3], its_out, its_lse, None, *options, *further)
    torch.testing.assert_close([its_out, its_lse, *gradients], [out, lse, *expected], rtol=1e-9, atol=1e-9)


def test_backends_must_say_that_they_take_them():
    form = BiasForm(placed=True, apart=True)
    assert BiasForm.decode(form.encode()) == form
    assert (form.names, replace(form, apart=False).names) == (("coordinates", "apart"), ("coordinates",))
