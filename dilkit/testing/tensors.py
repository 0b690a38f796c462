"""Tensors that backends are tried on: those of a case of the problem list, or random ones for any problem."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Intervals
from dilkit.problem import Problem
from dilkit.testing.bias_forms import BIAS_FORMS
from dilkit.testing.biases import made_bias
from dilkit.testing.poison import poisoned
from dilkit.testing.problems import BLOCKS, Case

LARGE = {"float64": (1e4, 1e4), "float32": (1e4, 1e4), "bfloat16": (1e4, 1e4), "float16": (30.0, 300.0)}
"""Largest (query or key, value) of "large" cases: what plain torch math in the dtype can still multiply without overflow."""

HUGE = {"float64": 1e19, "float32": 1e9, "bfloat16": 1e9, "float16": 5e4}
"""Largest query and key of "huge" cases: roundings of their scores are far larger than 1."""


@dataclass(frozen=True)
class Tensors:
    """Inputs, and the incoming gradients of `out` and `lse`; None for what there is not."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dout: Tensor
    dlse: Tensor | None = None
    sink: Tensor | None = None
    bias: Bias | None = None
    given: dict[str, Tensor] = field(default_factory=dict)
    """Return the tensors that the call gives a branch of the pattern, by argument."""

    @classmethod
    def random(cls, problem: Problem, seed: int = 0) -> Tensors:
        """Draw normal tensors on the problem's device, with gradients if it has them; a mask ignores the last eighths."""
        where = torch.device(problem.device.type, problem.device.index)
        generator = torch.Generator(where).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            shape = problem.batch, problem.seq, heads, problem.head_dim
            return torch.randn(shape, generator=generator, device=where).to(getattr(torch, problem.dtype))

        heads, kv_heads = problem.heads, problem.kv_heads
        query, key, value, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
        for x in (query, key, value):
            x.requires_grad_(problem.requires_grad)
        mask = None
        if problem.key_padding_mask:
            mask = torch.zeros(problem.batch, problem.seq, dtype=torch.bool, device=where)
            mask[:, problem.seq - problem.seq // 8 :] = True
        sizes, wide = (heads, problem.batch, problem.seq), lse_dtype(query.dtype)
        bias = None if problem.bias is None else made_bias(problem.bias, *sizes, generator, str(where), wide)
        return cls(query, key, value, mask, dout, bias=bias, given=_given(problem, "bools", generator, where))

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def to(self, dtype: str) -> Tensors:
        """Convert to `dtype`, without gradients; a bias, which has its own dtype, stays."""
        q, k, v, dout = (x.detach().to(getattr(torch, dtype)) for x in (*self.qkv, self.dout))
        sink = None if self.sink is None else self.sink.detach().to(q.dtype)
        return Tensors(q, k, v, self.mask, dout, self.dlse, sink, self.bias, self.given)


def make_tensors(case: Case, device: str = "cpu") -> Tensors:
    """Make the tensors of `case` on `device` in its layout: the same numbers at every call, on every device, in every dtype."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{case.feature} {case.variant}".encode()))
    kind = getattr(torch, case.dtype)
    rows = case.seq if case.queries is None else case.queries
    by_query = case.batch, rows, case.heads, case.head_dim
    by_key = case.batch, case.seq, case.kv_heads or case.heads, case.head_dim
    q, k, v, dout = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in (by_query, by_key, by_key, by_query))
    dlse = torch.randn(by_query[0], by_query[2], by_query[1], generator=draw, dtype=torch.float64).to(kind)
    mask = _mask(case, draw)
    q, k, v = _sized(case, q, k, v)
    if case.values == "ignored NaN" and mask is not None:
        k[mask], v[mask] = math.nan, math.nan
    if case.poisoned:
        q, k, v = (poisoned(case, x) for x in (q, k, v))
    q, k, v, dout = (_laid_out(x.to(device, kind), case.layout) for x in (q, k, v, dout))
    sink, sizes, wide = _sink(case, draw), (case.heads, case.batch, case.seq), lse_dtype(kind)
    bias = None if case.bias == "none" else made_bias(BIAS_FORMS[case.bias], *sizes, draw, device, wide)
    chosen = {name: x.to(device) for name, x in _given(case.problem(), case.blocks, draw, torch.device("cpu")).items()}
    mask, sink = (None if x is None else x.to(device) for x in (mask, sink))
    return Tensors(q, k, v, mask, dout, dlse.to(device, wide), sink, bias, chosen)


def _given(problem: Problem, form: str, draw: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    branch = problem.pattern.given_branch
    if branch is None:
        return {}
    if isinstance(branch, Intervals):
        heads, batch = 1 if form == "bools" else problem.heads, 1 if form == "numbers for all" else problem.batch
        return {"intervals": random_intervals((batch, heads, problem.seq, branch.most or 1), draw, device)}
    return {"block_layout": _block_layout(problem, branch.unit, form, draw, device)}


def random_intervals(shape: tuple[int, int, int, int], draw: torch.Generator, device: torch.device) -> Tensor:
    """Make intervals `(batch, heads, seq, most, 2)`, along the rows, equal for many, or any; a fifth of the rows see none."""
    batch, heads, seq, most = shape
    ends = torch.randint(seq + 1, (batch, heads, seq, 2 * most), generator=draw, device=device)
    row, mode = torch.arange(seq, device=device)[:, None], torch.randint(3, (batch, heads, 1, 1), generator=draw, device=device)
    some = ends[:, :, :: max(1, seq // 3)].repeat_interleave(max(1, seq // 3), 2)[:, :, :seq]
    along = (some + row - seq // 2).clamp(0, seq)
    ends = torch.where(mode == 0, ends, torch.where(mode == 1, some, along)).sort(-1).values
    intervals = ends.int().view(batch, heads, seq, most, 2)
    empty = (torch.rand(batch, heads, seq, most, generator=draw, device=device) < 0.25) & (mode == 0)
    empty[:, :, : seq // 5] = True
    return torch.where(empty[..., None], intervals.flip(-1), intervals)


def _block_layout(problem: Problem, size: int, form: str, draw: torch.Generator, device: torch.device) -> Tensor:
    """Make the layout of a call with blocks of `size` tokens: a third of the blocks, none in every fifth row."""
    blocks = -(-problem.seq // size)
    by_head = dict(zip(BLOCKS, (1, problem.heads, problem.kv_heads, 1), strict=True))[form]
    batch = 1 if form == "numbers for all" else problem.batch
    seen = torch.rand(batch, by_head, blocks, blocks, generator=draw, device=device) < 1 / 3
    seen[:, :, ::5] = False
    if not form.startswith("numbers"):
        return seen
    if problem.is_causal:
        seen = seen.tril()
    numbers = torch.arange(blocks, device=device).where(seen, -1)
    return numbers.sort(-1, descending=True).values[..., : max(1, int(seen.sum(-1).max()))]


def _sized(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    large, large_value = LARGE[case.dtype]
    if case.values == "huge":
        large = HUGE[case.dtype]
    if case.values in ("large query", "huge"):
        q = q * (large / q.abs().max())
    if case.values in ("large key", "huge"):
        k = k * (large / k.abs().max())
    if case.values == "large value":
        v = v * (large_value / v.abs().max())
    return q, k, torch.ones_like(v) if case.values == "constant value" else v


def _mask(case: Case, draw: torch.Generator) -> Tensor | None:
    if case.mask == "none":
        return None
    if case.mask == "random":
        return torch.rand(case.batch, case.seq, generator=draw) < 0.4
    element, token = torch.arange(case.batch)[:, None], torch.arange(case.seq)
    third = (case.seq + 2) // 3
    masked = dict(left=token < third, right=token >= case.seq - third, element=element == case.batch - 1, all=token >= 0)
    return masked[case.mask].expand(case.batch, case.seq).clone()


def _sink(case: Case, draw: torch.Generator) -> Tensor | None:
    if case.sink == "none":
        return None
    logits = torch.randn(case.heads, generator=draw, dtype=torch.float64)
    if case.sink == "of some heads":
        logits[::2] = -math.inf
    return (20 * logits if case.sink == "large" else logits).to(getattr(torch, case.dtype))


def _laid_out(x: Tensor, layout: str) -> Tensor:
    batch, seq, heads, dim = x.shape
    if layout == "sliced":
        room = x.new_full((batch + 1, 2 * seq, heads + 2, dim + 8), float("nan"))
        view = room[1:, ::2, 1:-1, 8:]
        return view.copy_(x)
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x[:1].contiguous().expand(batch, seq, heads, dim) if layout == "expanded" else x
