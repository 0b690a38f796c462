"""`RingDilatedAttention` within modules, checkpoints and compiled code: what the same module finds on the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import PATTERN, uneven_cuts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilkit import DilatedAttention, MultiheadDilatedAttention
from dilkit.comm import RingDilatedAttention, run_threads
from dilkit.comm.transports.threads import ThreadComm

pytestmark = pytest.mark.usefixtures("on_one_core")

SEQ, EMBED, HEADS, RANKS = 101, 32, 4, 3
CUTS = uneven_cuts(SEQ, RANKS)
Step = Callable[[nn.Module, Tensor], Tensor]


def module(attention: nn.Module, **options: Any) -> MultiheadDilatedAttention:
    """The same parameters at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MultiheadDilatedAttention(EMBED, HEADS, attention, dtype=torch.float64, **options)


def one_step(model: nn.Module, x: Tensor, weight: Tensor, step: Step) -> list[Tensor]:
    """The output of a step and gradients of all parameters and of the input."""
    x = x.detach().requires_grad_()
    out = step(model, x)
    (out * weight).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_as_on_one_rank(step: Step, ring: dict[str, Any] = {}, **options: Any) -> None:  # noqa: B006
    """Assert that shards put together, and parameter gradients added up over ranks, are those of one rank."""
    x, weight = torch.randn(2, 2, SEQ, EMBED, dtype=torch.float64)
    expected = one_step(module(DilatedAttention(PATTERN), **options), x, weight, step)

    def on_rank(comm: ThreadComm) -> list[Tensor]:
        rows = slice(*CUTS[comm.rank : comm.rank + 2])
        return one_step(models[comm.rank](comm), x[:, rows], weight[:, rows], step)

    made = module(DilatedAttention(PATTERN), **options)  # threads share one random generator: copies, not draws
    models = [lambda comm: _with_attention(copy.deepcopy(made), RingDilatedAttention(PATTERN, comm, **ring))] * RANKS
    every = run_threads(RANKS, on_rank, timeout=20)
    for i in (0, 1):
        torch.testing.assert_close(torch.cat([found[i] for found in every], dim=1), expected[i])
    for i in range(2, len(expected)):
        torch.testing.assert_close(sum(found[i] for found in every), expected[i])


def _with_attention(model: MultiheadDilatedAttention, attention: nn.Module) -> MultiheadDilatedAttention:
    model.attention = attention
    return model


@pytest.mark.parametrize("schedule", ["auto", "scatter", "gather", "ring"])
@pytest.mark.parametrize("options", [{}, dict(rotary=True), dict(rotary=True, num_kv_heads=2, is_causal=True, layer_norm=True)])
def test_multihead_attention_over_ranks_is_that_of_one_rank(schedule: str, options: dict[str, Any]) -> None:
    assert_as_on_one_rank(lambda model, x: model(x)[0], dict(schedule=schedule), **options)


def test_branches_one_by_one_and_scale_and_backend_are_passed_on() -> None:
    assert_as_on_one_rank(lambda model, x: model(x)[0], dict(fuse_branches=False, backend="reference"), rotary=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant: bool) -> None:
    """The backward pass runs the forward pass again, with all that it sends."""
    assert_as_on_one_rank(lambda model, x: checkpoint(lambda y: model(y)[0], x, use_reentrant=use_reentrant), rotary=True)


def test_gradients_accumulated_over_several_calls() -> None:
    def twice(model: nn.Module, x: Tensor) -> Tensor:
        model(x)[0].square().sum().backward()
        return model(x.square())[0]

    assert_as_on_one_rank(twice, rotary=True)


def test_a_copy_of_the_module_uses_the_same_transport() -> None:
    """`nn.TransformerEncoder` copies its layer."""

    def on_rank(comm: ThreadComm) -> bool:
        return copy.deepcopy(RingDilatedAttention(PATTERN, comm)).comm is comm

    assert all(run_threads(2, on_rank))


def test_what_the_module_says_of_itself() -> None:
    def on_rank(comm: ThreadComm) -> str:
        return repr(RingDilatedAttention(PATTERN, comm, schedule="ring"))

    assert "rank 1 of 2, schedule='ring'" in run_threads(2, on_rank)[1]
    (text,) = run_threads(1, lambda comm: repr(RingDilatedAttention(PATTERN, comm, keep="nothing")))
    assert "schedule='auto', keep='nothing'" in text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(keep="all"), ValueError, r"keep='all' is not known"),
        (dict(fuse_branches=1), TypeError, r"fuse_branches=1 is a int"),
        (dict(scale="1"), TypeError, r"scale='1' is a str"),
    ],
)
def test_arguments_that_are_none_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    def on_rank(comm: ThreadComm) -> None:
        with pytest.raises(error, match=text):
            RingDilatedAttention(**{**dict(pattern=PATTERN, comm=comm), **options})

    run_threads(1, on_rank)
