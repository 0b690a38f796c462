"""Attention over ranks under torch.compile, on two processes, which `torch.compile` is made for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.calls import NEEDS_COMPILER
from torch import nn
from torch.utils.checkpoint import checkpoint

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, dilated_attention
from dilkit.comm import Comm, PlanMismatch, RingDilatedAttention, ring_dilated_attention, shard_cuts, sum_over_ranks

PATTERN = Pattern([8, 24, 96], [1, 2, 4])
HEADS, HEAD_DIM = 4, 8
Make = Callable[["Comm | None"], nn.Module]


class Functions(nn.Module):
    """Calls of the function: with every argument, and two that do not depend on each other, one of few gradients."""

    def __init__(self, comm, dtype=torch.float64):
        super().__init__()
        self.attend: Any = dilated_attention if comm is None else partial(ring_dilated_attention, comm=comm)
        self.kept: dict[str, Any] = {} if comm is None else dict(keep="nothing")
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(HEAD_DIM, HEAD_DIM, generator=draw).to(dtype))
        self.sink = nn.Parameter(torch.randn(HEADS, generator=draw))

    def forward(self, x, mask):
        q, k = x @ self.weight, x[:, :, ::2].contiguous()
        options = dict(is_causal=True, key_padding_mask=mask, sink=self.sink, scale=0.3, dropout_p=0.25)
        out, lse = self.attend(q, k, k.sin(), pattern=PATTERN, **options, return_lse=True)
        aside = self.attend(q, k, k, pattern=PATTERN, **self.kept)
        beside = self.attend(q.detach() * 2, k.detach(), k, pattern=PATTERN, backend=["reference"])
        return out + aside * beside + lse.transpose(1, 2)[..., None].tanh()


class Network(nn.Module):
    """Layers with rotary positions, each of them computed again in the backward pass."""

    def __init__(self, comm, checkpointed=True, layers=2, **options):
        super().__init__()
        inner = DilatedAttention(PATTERN) if comm is None else RingDilatedAttention(PATTERN, comm)
        torch.manual_seed(0)
        options = dict(rotary=True, is_causal=True, sink=True, dtype=torch.float64) | options
        made = (MultiheadDilatedAttention(HEADS * HEAD_DIM, HEADS, inner, **options) for _ in range(layers))
        self.layers = nn.ModuleList(made)
        self.checkpointed = checkpointed

    def forward(self, x, mask):
        x = x.flatten(2)
        for layer in self.layers:
            attend = partial(self.one, layer, mask=mask)
            x = x + (checkpoint(attend, x, use_reentrant=False) if self.checkpointed else attend(x))
        return x.unflatten(2, (HEADS, HEAD_DIM))

    @staticmethod
    def one(layer, x, mask):
        return layer(x, key_padding_mask=mask)[0]


def whole(seq, dtype):
    draw = torch.Generator().manual_seed(seq)
    return torch.randn(2, seq, HEADS, HEAD_DIM, generator=draw).to(dtype), torch.rand(2, seq, generator=draw) < 0.2


def step(module, call, x, mask):
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    out = call(x, mask)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])]


def counted(comm, *arguments):
    before = comm.sent_bytes, comm.exchanges
    return step(*arguments), (comm.sent_bytes - before[0], comm.exchanges - before[1])


def check(comm, make, backend, *seqs, dtype=torch.float64, **options):
    """Compare a compiled step without breaks with the plain one and one process: bits for `aot_eager`, else within rounding."""
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = True  # where old graphs hide new faults
    over_ranks, alone = make(comm), make(None)
    compiled = torch.compile(over_ranks, fullgraph=True, backend=backend, **options)
    for seq in seqs:
        x, mask = whole(seq, dtype)
        first, last = shard_cuts(seq, comm.size, PATTERN)[comm.rank : comm.rank + 2]
        rows = slice(first, last)
        plain, plain_counts = counted(comm, over_ranks, over_ranks, x[:, rows], mask[:, rows])
        found, counts = counted(comm, over_ranks, compiled, x[:, rows], mask[:, rows])
        assert counts == plain_counts
        for mine, its in zip(found, plain, strict=True):
            allowed = 0.0 if backend == "aot_eager" else 8 * torch.finfo(dtype).eps * float(its.abs().max())
            torch.testing.assert_close(mine, its, rtol=0, atol=allowed)
        if dtype == torch.float64:
            expected = step(alone, alone, x, mask)
            torch.testing.assert_close(found[:2], [y[:, rows] for y in expected[:2]])
            torch.testing.assert_close(found[2:], [*own_part(comm, found[2:], expected[2:])])


def own_part(comm, found, expected):
    total = [x.clone() for x in found]
    sum_over_ranks(total, comm)
    return [x - (others - want) for x, others, want in zip(found, total, expected, strict=True)]


def essentials(comm):
    check(comm, Functions, "aot_eager", 50)
    check(comm, partial(Network, layers=1), "aot_eager", 40)
    refuse(comm, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))


def further(comm):
    check(comm, Network, "aot_eager", 40, 57)
    check(comm, partial(Network, checkpointed=False, num_kv_heads=2, sink=False), "aot_eager", 40, 57, 63, dynamic=True)
    check(comm, partial(Functions, dtype=torch.bfloat16), "aot_eager", 50, dtype=torch.bfloat16)
    check(comm, partial(Network, dtype=torch.bfloat16), "aot_eager", 50, dtype=torch.bfloat16)


def on_inductor(comm):
    import torch._inductor.config

    torch._inductor.config.fallback_random = True  # seeds are drawn as torch draws them
    check(comm, Functions, "inductor", 40, 57, dynamic=True)
    check(comm, partial(Network, layers=1, dtype=torch.bfloat16), "inductor", 50, dtype=torch.bfloat16)


def refused(comm):
    refuse(comm, schedule="any", sink=torch.zeros(HEADS + 1), dropout_p=1.0, is_causal=1, backend="nobody", query=torch.ones(3))
    compiled = torch.compile(ring_dilated_attention, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 20, HEADS, HEAD_DIM)
    with pytest.raises(PlanMismatch, match=r"has is_causal=\w+, the others \w+; all ranks must pass the same"):
        compiled(x, x, x, PATTERN, comm, is_causal=comm.rank == 1)
    x.requires_grad_()
    both = compiled if comm.rank else ring_dilated_attention, ring_dilated_attention  # one of the ranks compiles
    found, expected = (torch.autograd.grad(attend(x, x, x, PATTERN, comm).sin().sum(), x) for attend in both)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def refuse(comm, **wrong):
    """Assert that errors on all ranks name each of these arguments of rank 1."""
    compiled = torch.compile(ring_dilated_attention, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 20, HEADS, HEAD_DIM)
    for name, value in wrong.items():
        given = dict(query=x, key=x, value=x) | ({name: value} if comm.rank == 1 else {})
        error = (TypeError, ValueError) if comm.rank == 1 else PlanMismatch
        with pytest.raises(error, match=name if comm.rank == 1 else rf"on rank 1: \w+Error: .*{name}"):
            compiled(**given, pattern=PATTERN, comm=comm)


@pytest.mark.parametrize(
    "work",
    [
        essentials,
        pytest.param(refused, marks=pytest.mark.slow),
        pytest.param(further, marks=pytest.mark.slow),
        pytest.param(on_inductor, marks=[pytest.mark.slow, NEEDS_COMPILER]),
    ],
)
def test_two_ranks(work):
    launch.run("gloo", 2, work, limit=280)
