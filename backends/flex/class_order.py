"""A dilated pattern in one pass of FlexAttention: tokens sorted by residue class, and copies of the keys for each count.

queries      (batch, heads, classes * places, head_dim), or without a copy (classes, heads, places, head_dim) of one sequence
keys         (batch, kv_heads, slots, head_dim), gathered (`dilkit.pattern.flex.class_order`)
score_mod    softcap(s) + log count of the slot
mask_mod     the count of the pair is that of the slot; asked for in blocks alone whose pairs have several counts
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from dilkit import plan
from dilkit.backends.flex.call import FlexCall, Mod, padded
from dilkit.inputs import Inputs
from dilkit.pattern.flex.blocks import BLOCK
from dilkit.pattern.flex.class_order import BlockPairs, ClassOrder, class_order, class_rate
from dilkit.pattern.flex.pairs import Shows, counter, shown_by_several
from dilkit.pattern.lowering import Band, Segments
from dilkit.problem import DTYPE_BYTES, Problem

if TYPE_CHECKING:
    from torch import Tensor

FLOPS_A_BYTE = 120
"""FLOPs of attention in the time in which a byte is moved: about 500e12 over 4.2e12 on an H200, and as many on an A100."""
MOST_SLOTS = 2**30
_BLOCK_BITS = BLOCK.bit_length() - 1


@dataclass(frozen=True)
class NoOrder:
    """Stands in the pattern cache for a pattern that has no blocks in any class order."""

    nbytes: int = 0


def order_of(problem: Problem, least: int = BLOCK) -> ClassOrder | None:
    """Return the order in which one pass computes `problem`; None without one in which segments have `least` tokens a class."""
    features = problem.varlen, problem.kv_cache, problem.key_padding_mask, problem.bias, problem.dropout_p, problem.stored
    if any(features) or problem.queries is not None or not problem.seq:
        return None
    key = "flex class order", problem.pattern.to_json(), problem.heads, problem.kv_heads, problem.is_causal, problem.seq, least
    order = plan.cached(key, _order, problem, least)
    return None if isinstance(order, NoOrder) else order


def _order(problem: Problem, least: int) -> ClassOrder | NoOrder:
    rate = class_rate(problem.forms, problem.seq, least)
    if rate == 1:
        return NoOrder()
    places, several = padded(-(-problem.seq // rate)), shown_by_several(problem.forms, problem.pattern.overlap)
    heads = problem.heads, problem.kv_heads
    order = class_order(problem.forms, problem.seq, places, rate, heads, problem.is_causal, several)
    return NoOrder() if order is None or not order.levels or order.key_blocks.shape[1] * BLOCK > MOST_SLOTS else order


def pairs_in_given_order(problem: Problem) -> int:
    """Return a lower bound on the pairs of tokens computed without class order, over all heads."""
    rows, pairs = -(-problem.seq // BLOCK), 0
    for head in range(problem.heads):
        reach = 0
        for form in problem.forms:
            if form.serves(head) and isinstance(form, Segments):
                reach = max(reach, min(form.length, problem.seq))
            elif form.serves(head) and isinstance(form, Band):
                reach = max(reach, min(form.back, problem.seq) + min(form.ahead, problem.seq))
        pairs += rows * BLOCK * min(reach, problem.seq) // (2 if problem.is_causal else 1)
    return pairs * problem.batch


def moved_bytes(problem: Problem, order: ClassOrder) -> int:
    """Count the bytes that reordering copies in a forward pass: keys and values, and for a batch also queries and `out`."""
    row = problem.batch * order.rate * order.places * problem.head_dim * DTYPE_BYTES[problem.dtype]
    is_view = problem.batch == 1 and problem.seq == order.rate * order.places
    return int(row * (problem.kv_heads * 2 * (1 + order.copies) + (0 if is_view else problem.heads * 4)))


def pays(problem: Problem, order: ClassOrder) -> bool:
    """True if class order is estimated to be faster: its copies cost less than the products that it saves."""
    flops = 4 * problem.head_dim
    products = flops * order.pairs * problem.batch
    return products + FLOPS_A_BYTE * moved_bytes(problem, order) < flops * pairs_in_given_order(problem)


def described(problem: Problem, order: ClassOrder) -> str:
    """Describe why class order was chosen, for `explain`: pairs with and without it, and bytes copied."""
    pairs, others = order.pairs * problem.batch, pairs_in_given_order(problem)
    return (
        f"one pass over the tokens of {order.rate} residue classes: {pairs:,} pairs in blocks, at least {others:,} without; "
        f"{moved_bytes(problem, order):,} bytes of copies, each key {order.copies:.2f} times"
    )


@dataclass(frozen=True)
class ClassTables:
    """Tables on a device that calls of a pattern in class order share."""

    count: Shows
    tokens: Tensor
    """The token of each slot, `(kv_heads, slots)`, int32."""
    rows: Tensor
    """The row of each slot, `(batch, kv_heads, slots)`, among `batch * seq * kv_heads`; without a token, one after the last."""
    has_missing: bool
    """True if some slot has no token."""
    all_see: bool
    """True if every query sees a key."""
    lists: tuple[Tensor, ...]
    """Numbers and indices of partial and of whole key blocks; the same of query blocks, if a gradient will be computed."""

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.rows.nbytes + sum(x.nbytes for x in self.lists) + plan.ENTRY_BYTES


def _tables(problem: Problem, order: ClassOrder, batch: int, by_class: bool, back: bool, device: torch.device) -> ClassTables:
    classes, rows = order.rate, order.rate * order.places // BLOCK

    def of_queries(blocks: BlockPairs) -> list[Tensor]:
        lists = [torch.from_numpy(x).to(device, torch.int32) for x in blocks.listed(problem.heads, rows)]
        if by_class:  # as a batch of classes
            return [torch.unflatten(x, 1, (classes, -1)).transpose(0, 1).contiguous() for x in lists]
        return [x[None] for x in lists]

    def of_keys(blocks: BlockPairs) -> list[Tensor]:
        lists = blocks.listed(problem.heads, order.key_blocks.shape[1], of_keys=True)
        return [torch.from_numpy(x).to(device, torch.int32)[None] for x in lists]

    lists = [*of_queries(order.partial), *of_queries(order.whole)]
    if back:
        lists += [*of_keys(order.partial), *of_keys(order.whole)]
    count, tokens = counter(problem.forms, order.rate * order.places + 1, device), torch.from_numpy(order.tokens)
    missing, heads = tokens >= problem.seq, problem.kv_heads
    sequence, head = (torch.arange(size, device="cpu") for size in (batch, heads))
    places = (sequence[:, None, None] * problem.seq + tokens) * heads + head[:, None]
    places = places.masked_fill(missing, last := batch * problem.seq * heads)
    places = places.to(device, torch.int32 if last < 2**31 else torch.int64)
    all_see = bool((lists[2] > 0).all())  # a block of queries with a whole block of keys
    return ClassTables(count, tokens.to(device, torch.int32), places, bool(missing.any()), all_see, tuple(lists))


def differentiate(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    weights: None,
    block_mask: Any,
    scale: float,
    kernel: str,
    joint: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, given `out` and `lse` of the whole softmax; to be compiled.

    `joint` differentiates the change of scores; compiled, torch makes it.
    """
    mods = flex_attention._identity if score_mod is None else score_mod(weights), joint
    lse = lse if kernel == "FLASH" else lse * math.log2(math.e)  # the other kernels go by powers of 2
    arguments = query, key, value, out, lse, dout, None, *mods, block_mask.as_tuple(), scale, {"BACKEND": kernel}, (), ()
    dquery, dkey, dvalue, _ = torch.ops.higher_order.flex_attention_backward(*arguments)
    return dquery, dkey, dvalue


class ClassCall:
    """A call with its rows in class order: its arguments, and its results in token order. `back`: for the backward pass."""

    def __init__(self, inputs: Inputs, problem: Problem, order: ClassOrder, back: bool) -> None:
        self.inputs, self.problem, self.order = inputs, problem, order
        self.batch, self.seq = inputs.query.shape[:2]
        self.by_class = self.batch == 1 and not back
        device = inputs.query.device
        key = "flex class tables", problem.pattern.to_json(), problem.heads, problem.kv_heads, problem.is_causal, self.seq
        options = self.batch, self.by_class, back, device
        self.tables: ClassTables = plan.cached((*key, *options), partial(_tables, problem, order, *options))

    @property
    def all_see(self) -> bool:
        return self.tables.all_see

    def arguments(self) -> FlexCall:
        key, value = self._keys(self.inputs.key), self._keys(self.inputs.value)
        if self.by_class:
            key, value = (x.expand(self.order.rate, -1, -1, -1) for x in (key, value))
        query = self._queries(self.inputs.query)
        return FlexCall(query, key, value, self._score_mod(), None, self._block_mask(query.shape[2]), self.problem.scale)

    def results(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return out `(batch, seq, heads, head_dim)` and lse `(batch, heads, seq)`."""
        lse = lse.transpose(0, 1)[None] if self.by_class else torch.unflatten(lse, 2, (self.order.rate, -1))
        return self._tokens(out), lse.transpose(2, 3).flatten(2)[:, :, : self.seq]

    def of_whole(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the backward pass takes of the whole softmax."""
        by_row = self._queries(lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1)
        return self._queries(dout), self._queries(out), by_row

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tensors of the call, `(batch, seq, heads, head_dim)`, from those of `arguments`."""
        return self._tokens(query).contiguous(), self._sums(key), self._sums(value)

    def _queries(self, x: Tensor) -> Tensor:
        """Sort rows `(batch, seq, heads, head_dim)` by class: without a copy if classes are the batch and none is short."""
        order = self.order
        if missing := order.rate * order.places - self.seq:
            x = F.pad(x, (0, 0, 0, 0, 0, missing))
        classes = torch.unflatten(x, 1, (order.places, order.rate)).permute(0, 2, 3, 1, 4)
        return classes[0] if self.by_class else classes.transpose(1, 2).flatten(2, 3)

    def _tokens(self, x: Tensor) -> Tensor:
        """Take results of queries back into the order of tokens: without a copy by class."""
        classes = x.transpose(0, 1)[None] if self.by_class else torch.unflatten(x, 2, (self.order.rate, -1))
        return classes.permute(0, 3, 2, 1, 4).flatten(1, 2)[:, : self.seq]

    def _keys(self, x: Tensor) -> Tensor:
        rows, last = self.tables.rows, self.batch * self.seq * x.shape[2]
        chosen = rows.clamp(max=last - 1) if self.tables.has_missing else rows
        gathered = x.reshape(last, -1).index_select(0, chosen.flatten()).view(*rows.shape, -1)
        if self.tables.has_missing:  # what is not finite must not reach other rows
            gathered.masked_fill_((rows == last)[..., None], 0.0)
        return gathered

    def _sums(self, x: Tensor) -> Tensor:
        """Add up the gradients of the slots of a token, those of one count after the other: in a fixed order."""
        rows, shape = self.tables.rows, (self.batch, self.seq, x.shape[1], x.shape[3])
        total = x.new_zeros((math.prod(shape[:3]) + 1, x.shape[3]))
        starts = [start * BLOCK for _, start in self.order.levels]
        for start, stop in zip(starts, [*starts[1:], x.shape[2]], strict=True):  # in each of which a row occurs once
            total.index_add_(0, rows[:, :, start:stop].flatten(), x[:, :, start:stop].flatten(0, 2))
        return total[:-1].view(shape)

    def _score_mod(self) -> Any:
        """Make the change of scores: of numbers of slots alone, in which a kernel that FlexAttention generates reads no table."""
        softcap, levels = self.problem.softcap, [(math.log(level), start) for level, start in self.order.levels]
        if not softcap and levels[-1][0] == 0:
            return None

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            block = j >> _BLOCK_BITS  # one number for a tile of keys
            zero = block.to(torch.float32) * 0.0  # FlashAttention 4 takes the dtype of a constant from what it is chosen beside
            added = zero + levels[0][0]
            for logarithm, start in levels[1:]:
                added = torch.where(block >= start, zero + logarithm, added)
            return score + added

        return lambda weights: score_mod

    def _mask_mod(self) -> Mod:
        tables, order, problem, by_class = self.tables, self.order, self.problem, self.by_class
        slots, group = tables.tokens.shape[1], problem.heads // problem.kv_heads
        if not len(order.partial.head):
            return lambda b, h, i, j: j < slots
        rate, places, count, tokens = order.rate, order.places, tables.count, tables.tokens
        rows = torch.tensor(self.seq, dtype=torch.int32, device=tokens.device)

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            query, key = i * rate + b if by_class else i % places * rate + i // places, tokens[h // group, j]
            level = h * 0 + order.levels[0][0]
            for one, start in order.levels[1:]:
                level = torch.where(j >> _BLOCK_BITS >= start, one, level)
            seen = (query < rows) & (key < rows) & (count(h, query, key) == level)
            return seen & (key <= query) if problem.is_causal else seen

        return mask_mod

    def _block_mask(self, rows: int) -> Any:
        lists: Any = self.tables.lists if len(self.tables.lists) > 4 else (*self.tables.lists, None, None, None, None)
        lengths = rows, self.tables.tokens.shape[1]
        options: Any = dict(BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=self._mask_mod())
        return flex_attention.BlockMask(lengths, *lists, **options)
