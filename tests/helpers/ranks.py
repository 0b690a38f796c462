"""Dilated attention over ranks as threads, judged as the conformance suite judges backends."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from helpers.calls import starts_of
from torch import Tensor

from dilkit import Pattern
from dilkit.comm import (
    ExchangePlan,
    Fault,
    PackedPlan,
    exchange_plan,
    ring_dilated_attention,
    ring_dilated_attention_varlen,
    run_threads,
)
from dilkit.comm.transports.threads import ThreadComm
from dilkit.testing import accuracy, conformance
from dilkit.testing.accuracy import Expected
from dilkit.testing.problems import Case
from dilkit.testing.tensors import Tensors, make_tensors

TURNS = pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2, 3))])
"""For tests of anything that may be drawn: a quarter of the examples by default, others of as many in each further turn."""
PATTERN = Pattern([8, 24, 97], [1, 3, 5])
"""Some segments within ranks, some not; none ends where shards do."""


@dataclass(frozen=True)
class Found:
    results: dict[str, Tensor]
    forward_bytes: list[int]
    backward_bytes: list[int]
    plan: Any


def even_cuts(seq: int, world_size: int) -> tuple[int, ...]:
    return tuple(t * seq // world_size for t in range(world_size + 1))


def uneven_cuts(seq: int, world_size: int, seed: int = 0) -> tuple[int, ...]:
    return (0, *sorted(random.Random(f"{seq} {seed}").sample(range(1, seq), world_size - 1)), seq)


def over_ranks(
    tensors: Tensors,
    pattern: Pattern,
    cuts: Sequence[int],
    *,
    lengths: Sequence[int] = (),
    gradients: bool = True,
    through_lse: bool = False,
    timeout: float = 20.0,
    faults: Sequence[Fault] = (),
    **options,
) -> Found:
    """`ring_dilated_attention` forward and, with `gradients`, backward, each rank with its rows.

    `lengths`: those of packed sequences, in a batch of one. Gradients are those through `out`, with `through_lse` through both.
    """
    query, key, value, mask, dout = tensors.query, tensors.key, tensors.value, tensors.mask, tensors.dout

    def on_rank(comm):
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        shards = [x.detach()[:, rows].requires_grad_(gradients) for x in (query, key, value)]
        given = options if mask is None else dict(options, key_padding_mask=mask[:, rows])
        sinks = {} if tensors.sink is None else dict(sink=tensors.sink.detach().requires_grad_(gradients))
        out, lse = _attend(shards, pattern, comm, lengths, **sinks, **given)
        sent, found = comm.sent_bytes, dict(out=out.detach(), lse=lse.detach().transpose(1, 2))
        if gradients:
            names = ("dq", "dk", "dv", *(f"d{name}" for name in sinks))
            ends, incoming = [out], [dout[:, rows]]
            if through_lse and tensors.dlse is not None:
                ends, incoming = [out, lse], [dout[:, rows], tensors.dlse[:, :, rows].masked_fill(lse == -torch.inf, 0.0)]
            found |= zip(names, torch.autograd.grad(ends, [*shards, *sinks.values()], incoming), strict=True)
        return found, sent, comm.sent_bytes - sent

    every = run_threads(len(cuts) - 1, on_rank, timeout=timeout, faults=faults)
    parts = {name: [found[name] for found, _, _ in every] for name in every[0][0]}
    results = {name: sum(rows) if name == "dsink" else torch.cat(rows, dim=1) for name, rows in parts.items()}
    results["lse"] = results["lse"].transpose(1, 2)
    sizes = query.shape[2], key.shape[2]
    chosen = {name: options[name] for name in ("is_causal", "schedule", "fuse_branches", "keep") if name in options}
    plan = plan_of(pattern, cuts, lengths, *sizes, **chosen)
    return Found(results, [sent for _, sent, _ in every], [sent for _, _, sent in every], plan)


def on_one(attend: Callable[..., Any], tensors: Tensors, through_lse: bool = False) -> dict[str, Tensor]:
    leaves = dict(q=tensors.query, k=tensors.key, v=tensors.value) | ({} if tensors.sink is None else dict(sink=tensors.sink))
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    query, key, value, *sink = leaves.values()
    out, lse = attend(query, key, value, **(dict(sink=sink[0]) if sink else {}))
    ends, incoming = [out], [tensors.dout]
    if through_lse and tensors.dlse is not None:
        ends, incoming = [out, lse], [tensors.dout, tensors.dlse.masked_fill(lse == -torch.inf, 0.0)]
    grads = torch.autograd.grad(ends, [*leaves.values()], incoming)
    return dict(out=out.detach(), lse=lse.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


def _attend(shards: Sequence[Tensor], pattern: Pattern, comm: ThreadComm, lengths: Sequence[int], **options):
    if not lengths:
        return ring_dilated_attention(*shards, pattern, comm, return_lse=True, **options)
    starts = starts_of(lengths)
    packed = (x.squeeze(0) for x in shards)
    found = ring_dilated_attention_varlen(*packed, pattern, comm, starts, return_lse=True, **options)
    return tuple(x.unsqueeze(0) for x in found)


def raised_on_all(
    world_size: int, call: Callable[[ThreadComm], Any], text: str = "", error=(TypeError, ValueError)
) -> list[Exception]:
    def on_rank(comm):
        with pytest.raises(error, match=text) as caught:
            call(comm)
        return caught.value

    return run_threads(world_size, on_rank, timeout=20)


def plan_of(
    pattern: Pattern, cuts: Sequence[int], lengths: Sequence[int], heads: int, kv_heads: int, **options
) -> ExchangePlan | PackedPlan:
    if lengths:
        return PackedPlan(pattern, tuple(cuts), tuple(accumulate(lengths, initial=0)), heads, kv_heads, **options)
    return exchange_plan(pattern, tuple(cuts), heads, kv_heads, **options)


def of_case(case: Case, cuts: Sequence[int], **options) -> Found:
    settings = dict(is_causal=case.is_causal, scale=case.scale, gradients=case.gradients)
    return over_ranks(make_tensors(case), case.pattern, cuts, **{**settings, **options})


def assert_right(case: Case, found: Found, slack: float = 1.0):
    """Assert that no error against fp64 exceeds that of plain torch math by more than the project's rule allows.

    `slack` multiplies what is allowed: of a few numbers, plain torch math may hit all by luck.
    """
    tensors = make_tensors(case)
    wrong = conformance._malformed(found.results, tensors, case)
    wrong += conformance._judge(found.results, _slackened(expected(case), slack))[1]
    assert not wrong, "; ".join(wrong)


def _slackened(want: Expected, slack: float) -> Expected:
    return replace(want, error={name: slack * error for name, error in want.error.items()})


def assert_counted(found: Found, tensors: Tensors):
    options = dict(head_dim=tensors.query.shape[3], dtype=str(tensors.query.dtype).removeprefix("torch."))
    if isinstance(found.plan, ExchangePlan):
        options |= dict(batch=tensors.query.shape[0], key_padding_mask=tensors.mask is not None)
    ranks = range(len(found.forward_bytes))
    assert found.forward_bytes == [found.plan.bytes(rank, "forward", **options) for rank in ranks]
    if "dq" in found.results:
        assert found.backward_bytes == [found.plan.bytes(rank, "backward", **options) for rank in ranks]


@lru_cache(maxsize=1024)
def expected(case: Case) -> Expected:
    return accuracy.expected(case.problem(), replace(make_tensors(case), dlse=None))
