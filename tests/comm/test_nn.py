"""`RingDilatedAttention` within modules and checkpoints."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.ranks import PATTERN, uneven_cuts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilkit import DilatedAttention, MultiheadDilatedAttention, order
from dilkit.comm import RingDilatedAttention, run_threads

pytestmark = pytest.mark.usefixtures("on_one_core")

SEQ, EMBED, HEADS, RANKS = 101, 32, 4, 3
CUTS = uneven_cuts(SEQ, RANKS)
HILBERT = order((6, 8), extra_tokens=1)
Step = Callable[[nn.Module, Tensor], Tensor]


def one_step(model, x, weight, step):
    x = x.detach().requires_grad_()
    out = step(model, x)
    (out * weight).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def once(model, x):
    return model(x)[0]


def twice(model, x):
    model(x)[0].square().sum().backward()
    return model(x.square())[0]


def checkpointed(model, x, use_reentrant=False):
    return checkpoint(partial(once, model), x, use_reentrant=use_reentrant)


STEPS = {
    "auto": (once, {}, {}),
    "scatter": (once, dict(schedule="scatter"), dict(rotary=True)),
    "gather": (once, dict(schedule="gather"), dict(rotary=True, num_kv_heads=2, is_causal=True, layer_norm=True)),
    "ring": (once, dict(schedule="ring"), dict(num_kv_heads=2, is_causal=True)),
    "one by one": (once, dict(fuse_branches=False, backend="reference"), dict(rotary=True)),
    "checkpointed": (checkpointed, {}, dict(rotary=True)),
    "checkpointed, reentrant": (partial(checkpointed, use_reentrant=True), {}, dict(rotary=True)),
    "accumulated": (twice, {}, dict(rotary=True)),
}


@pytest.mark.parametrize("name", STEPS)
def test_multihead_attention_over_ranks_is_that_of_one_rank(name):
    step, ring, options = STEPS[name]
    x, weight = torch.randn(2, 2, SEQ, EMBED, dtype=torch.float64)
    made = MultiheadDilatedAttention(EMBED, HEADS, DilatedAttention(PATTERN), dtype=torch.float64, **options)
    expected = one_step(copy.deepcopy(made), x, weight, step)

    def on_rank(comm):
        rows, mine = slice(*CUTS[comm.rank : comm.rank + 2]), copy.deepcopy(made)
        mine.attention = RingDilatedAttention(PATTERN, comm, **ring)
        return one_step(mine, x[:, rows], weight[:, rows], step)

    every = run_threads(RANKS, on_rank, timeout=20)
    for i in (0, 1):
        torch.testing.assert_close(torch.cat([found[i] for found in every], dim=1), expected[i])
    for i in range(2, len(expected)):
        torch.testing.assert_close(sum(found[i] for found in every), expected[i])


def test_the_module_shows_its_arguments():
    shown = "order=order((6, 8), 'hilbert', extra_tokens=1), rank 1 of 2, schedule='ring', keep='nothing'"
    module = partial(RingDilatedAttention, order=HILBERT, schedule="ring", keep="nothing")
    assert shown in run_threads(2, lambda comm: repr(module(PATTERN, comm)))[1]
