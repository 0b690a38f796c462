"""The caches that decode, behind one interface: slots that each hold the first tokens of one sequence of a batch.

DilatedCache, dilated_cache(), DynamicCache      all slots at one pace
PagedCache, dilated_attention_with_kvcache       each slot at its own
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilkit import DilatedCache, PagedCache, PoolFullError, dilated_attention_with_kvcache
from dilkit.bias.base import Bias
from dilkit.decoding.layout import width_of
from dilkit.testing.problems import Case
from dilkit.testing.tensors import Tensors

Rows = tuple[Tensor, Tensor, Tensor]
ROOMY = 1 << 22
"""Bytes of a pool that is never full."""


class Slots(ABC):
    """A cache of one case. `texts[i]`: the sequence of the batch that slot i holds; `seen[i]`: tokens of it so far.

    `rollback`: tokens before the longest length that can be taken back; None where all can.
    """

    at_one_pace: ClassVar[bool] = True

    def __init__(self, case: Case, tensors: Tensors, options: dict[str, Any], rollback: int | None):
        self.case, self.tensors, self.options, self.rollback = case, tensors, options, rollback
        self.sizes = case.heads, case.kv_heads or case.heads, case.head_dim
        self.texts = list(range(len(tensors.query)))
        self.seen = [0] * len(self.texts)

    @abstractmethod
    def attend(self, rows: Rows, counts: Sequence[int]) -> list[Tensor]:
        """Return the attention of the next `counts[i]` tokens of each slot, taken from `rows`, `(count, heads, head_dim)`."""

    @abstractmethod
    def crop(self, slot: int, length: int):
        """Forget all tokens of a slot, or of all where these have one pace, but the first `length`."""

    @abstractmethod
    def move(self, order: list[int], how: int):
        """Make slot i what slot `order[i]` was; `how`: a number that chooses another way to copy the cache, too."""

    def close(self):  # noqa: B027 (most have nothing to give back)
        """Give everything back."""

    def bias(self, texts: Sequence[int], length: int) -> Bias | None:
        bias = self.tensors.bias
        if bias is None or not bias.by_row:
            return bias
        whole = [bias.of_sequence(text, length) for text in texts]
        names = ("coordinates", "neutral") if getattr(bias, "neutral", None) is not None else ("coordinates",)
        return replace(bias, **{name: torch.stack([getattr(one, name) for one in whole]) for name in names})


class _OnePace(Slots):
    def attend(self, rows: Rows, counts: Sequence[int]) -> list[Tensor]:
        own = slice(self.seen[0], self.seen[0] + counts[0])
        in_order = self.texts == list(range(len(rows[0])))
        new = [x[:, own] if in_order else x[self.texts, own].contiguous() for x in rows]  # a slice keeps the strides
        return list(self.attend_batch(new, self.bias(self.texts, own.stop)).unbind())

    @abstractmethod
    def attend_batch(self, rows: list[Tensor], bias: Bias | None) -> Tensor:
        """Return the attention of new rows `(slots, rows, heads, head_dim)`."""


class OfDilatedCache(_OnePace):
    def __init__(self, case: Case, tensors: Tensors, options: dict[str, Any], rollback: int, stored: str | None):
        shortest = min(branch.forgets_every for branch in case.pattern.branches)
        super().__init__(case, tensors, options, min(rollback, shortest))
        self.cache = DilatedCache(case.pattern, self.sizes[1], rollback=min(rollback, shortest), stored=stored)

    def attend_batch(self, rows: list[Tensor], bias: Bias | None) -> Tensor:
        return self.cache.attend(*rows, bias=bias, **self.options)

    def crop(self, slot: int, length: int):
        self.cache.crop(length)

    def move(self, order: list[int], how: int):
        if how % 3 == 0:
            self.cache = copy.copy(self.cache)
        elif how % 3 == 1:
            restored = DilatedCache(self.case.pattern, self.sizes[1], rollback=self.cache.rollback, stored=self.cache.stored)
            restored.load_state_dict(self.cache.state_dict())
            self.cache = restored
        if self.cache.seen:
            self.cache.reorder(order)


class _OfTransformers(_OnePace):
    """A cache of transformers, read by the attention function that `register` gives it."""

    def __init__(self, case: Case, tensors: Tensors, options: dict[str, Any], rollback: int | None, cache):
        super().__init__(case, tensors, options, rollback)
        kv_heads = self.sizes[1] if case.pattern.head_shard is None else case.pattern.head_shard[1]
        heads = dict(num_attention_heads=case.heads // self.sizes[1] * kv_heads, num_key_value_heads=kv_heads)
        self.cache, self.layer = cache, _Layer(SimpleNamespace(**heads))

    def attend_batch(self, rows: list[Tensor], bias: Bias | None) -> Tensor:
        from dilkit.integrations.transformers.attention import attend
        from dilkit.integrations.transformers.biases.tables import PositionBias

        query, key, value = (x.transpose(1, 2) for x in rows)
        keys, values = self.cache.update(key, value, 0)
        more = {} if bias is None else dict(position_bias=PositionBias(lambda: bias))
        more |= dict(scaling=self.options["scale"], softcap=self.options["softcap"], s_aux=self.options["sink"])
        return attend(self.case.pattern, None, self.layer, query, keys, values, None, is_causal=True, **more)[0]

    def crop(self, slot: int, length: int):
        self.cache.crop(length - self.seen[0])

    def move(self, order: list[int], how: int):
        if how % 3 == 0:
            self.cache = copy.deepcopy(self.cache)
        if self.seen[0]:
            (self.cache.reorder_cache if how % 2 else self.cache.batch_select_indices)(torch.tensor(order))


class _Layer:
    """A layer of a model, as far as the attention function asks for one."""

    layer_idx = 0

    def __init__(self, config: SimpleNamespace):
        self.config = config

    def forward(self, hidden_states: Tensor):
        """Do nothing; the names of the arguments are read."""


class OfDilatedLayer(_OfTransformers):
    def __init__(self, case: Case, tensors: Tensors, options: dict[str, Any], rollback: int):
        from dilkit.integrations.transformers import dilated_cache

        own = min(rollback, *(branch.forgets_every for branch in case.pattern.branches))
        super().__init__(case, tensors, options, own, dilated_cache(own))


class OfDynamicCache(_OfTransformers):
    def __init__(self, case: Case, tensors: Tensors, options: dict[str, Any]):
        from transformers import DynamicCache

        super().__init__(case, tensors, options, None, DynamicCache())


class OfPagedCache(Slots):
    """`PagedCache`, the pages of which hold NaN before anything is stored."""

    at_one_pace = False

    def __init__(
        self,
        case: Case,
        tensors: Tensors,
        options: dict[str, Any],
        rollback: int,
        stored: str | None,
        page_rows: int,
        pages: int | None,
    ):
        super().__init__(case, tensors, options, rollback)
        dtype = tensors.query.dtype
        kept = dtype if stored is None else getattr(torch, stored)
        page = 2 * page_rows * self.sizes[1] * width_of(case.head_dim, kept) * kept.itemsize
        nbytes = max(ROOMY, 200 * page) if pages is None else pages * page
        more = dict(page_rows=page_rows, rollback=rollback, dtype=dtype, stored=stored)
        self.cache = PagedCache(case.pattern, *self.sizes, nbytes=nbytes, **more)
        if stored != "int8":
            self.cache.pool.rows.fill_(torch.nan)
        self.numbers = [self.cache.add() for _ in self.texts]

    def attend(self, rows: Rows, counts: Sequence[int]) -> list[Tensor]:
        pieces = [(text, slice(seen, seen + count)) for text, seen, count in zip(self.texts, self.seen, counts, strict=True)]
        new = (torch.cat([x[text, own] for text, own in pieces]) for x in rows)
        before = self.cache.pool.free
        try:
            out = self.cache.attend(*new, self.numbers, counts, bias=self.tensors.bias, **self.options)
        except PoolFullError:
            assert (before, self.seen) == (self.cache.pool.free, [self.cache.seen(number) for number in self.numbers])
            raise
        return list(torch.split(out, list(counts)))

    def crop(self, slot: int, length: int):
        self.cache.crop(self.numbers[slot], length)

    def move(self, order: list[int], how: int):
        if how % 3 == 0:
            self.numbers[0], old = self.cache.fork(self.numbers[0]), self.numbers[0]
            self.cache.drop(old)
        self.cache.reorder(self.numbers, order)

    def close(self):
        for number in self.numbers:
            self.cache.drop(number)
        assert self.cache.pool.free == self.cache.pool.pages, "pages have not come back"


class OfKvCache(Slots):
    """`dilated_attention_with_kvcache`, over tensors that hold NaN beyond each sequence."""

    at_one_pace = False

    def __init__(self, case: Case, tensors: Tensors, options: dict[str, Any], side_by_side: bool):
        super().__init__(case, tensors, options, None)
        sizes, dtype = (len(self.texts), case.seq, *self.sizes[1:]), tensors.query.dtype
        if side_by_side:
            self.caches = list(torch.full((*sizes[:2], 2, *sizes[2:]), torch.nan, dtype=dtype).unbind(2))
        else:
            self.caches = [torch.full(sizes, torch.nan, dtype=dtype) for _ in range(2)]

    def attend(self, rows: Rows, counts: Sequence[int]) -> list[Tensor]:
        outs: list[Tensor] = []
        for count, group in groupby(range(len(counts)), counts.__getitem__):
            slots = list(group)
            outs += self._attend(rows, slice(slots[0], slots[-1] + 1), count) if count else [rows[0][0, :0]] * len(slots)
        return outs

    def _attend(self, rows: Rows, slots: slice, count: int) -> Sequence[Tensor]:
        texts, starts = self.texts[slots], self.seen[slots]
        query, key, value = (
            torch.stack([x[text, start : start + count] for text, start in zip(texts, starts, strict=True)]) for x in rows
        )
        own, lengths = [cache[slots] for cache in self.caches], torch.tensor(starts, dtype=torch.int32)
        new = dict(key=key, value=value)
        if count % 3 == 2:  # they are there already
            new, lengths = {}, lengths + count
            for cache, written in zip(own, (key, value), strict=True):
                for i, start in enumerate(starts):
                    cache[i, start : start + count] = written[i]
        bias = self.bias(texts, self.case.seq)
        out = dilated_attention_with_kvcache(
            query, *own, self.case.pattern, **new, cache_seqlens=lengths, bias=bias, **self.options
        )
        return out.unbind()

    def crop(self, slot: int, length: int):
        for cache in self.caches:
            cache[slot, length:] = torch.nan

    def move(self, order: list[int], how: int):
        for cache in self.caches:
            cache.copy_(cache[order])
