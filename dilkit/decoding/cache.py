"""`DilatedCache`: the keys and values that a batch of sequences still needs, and no more."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import integer, integers, one_of, real, shown
from dilkit.decoding._streams import Ring, at_once
from dilkit.decoding.layout import Layout, check_no_gradient, decoded, encoded, name_of
from dilkit.decoding.prepared_step import PreparedStep, Rows, ScoreOptions, StepFacts, prepare
from dilkit.decoding.sequence_rows import SequenceRows
from dilkit.decoding.stores import CacheState, check_decodable, loaded, open_rows, state_of
from dilkit.inputs import Inputs
from dilkit.op._facts import tensor_key
from dilkit.op.arguments import call_of, check_inputs, check_pattern
from dilkit.op.autocast import in_given_dtypes
from dilkit.op.boundary import lse_dtype
from dilkit.op.operators import attend
from dilkit.op.scores import scores_of
from dilkit.op.zero_keys import check_sink
from dilkit.pattern import WHOLE_SEQUENCE, Pattern
from dilkit.problem import STORED, Problem, check_scale
from dilkit.selector import requested_backends, select, state


class DilatedCache:
    """Keys and values that later rows of a causal `dilated_attention` can still see, and attention over them.

        attend(q, k, v) = the last rows of dilated_attention(all q, all k, all v, pattern, is_causal=True)

    A key whose segment has ended in every branch is never seen again. Of each branch, the cache keeps the rows of the open
    segment that a key/value head keeps, at most `ceil(w_b / r_b)` for any number of tokens; of a branch over the whole sequence
    one row in `r_b`; of a window the last rows, at most `window`; global tokens for ever, and all rows before the last that is to
    see all; of strides and blocks all rows.

    - `pattern`: a `dilkit.Pattern` without a `Neighborhood`; its tail has no effect under causality.
    - `kv_heads`: key/value heads. Batch, query heads, head_dim, dtype and device are those of the first call of `attend`.
    - `rollback`: tokens that `crop` can always take back, as speculative decoding does, at most the shortest segment. They are
      counted from the longest length since the cache was empty. `ceil(rollback / r_b)` rows more are kept of each branch of
      segments, and `rollback` more of a window.
    - `stored`: None, rows are kept as they are; "bfloat16", beside float32 queries; or "int8", beside all but float64: a row of a
      key/value head as integers and one float32, `row = scale * integers`, `scale = max |row| / 127`. A number of a kept row is
      off by at most `scale / 2`, in bfloat16 by 2**-8 of itself. `attend` returns exactly the attention over these rounded keys
      and values.

    All sequences of a batch have the same length; give sequences of other lengths a cache of their own. Raises TypeError or
    ValueError for a pattern or heads that do not fit.

    Example:

        >>> import torch
        >>> from dilkit import DilatedCache, Pattern, dilated_attention
        >>> pattern = Pattern([8, 32], [1, 4])
        >>> q, k, v = torch.randn(3, 1, 100, 4, 16).unbind()  # (batch, seq, heads, head_dim)
        >>> cache = DilatedCache(pattern, kv_heads=4)
        >>> out = [cache.attend(q[:, :50], k[:, :50], v[:, :50])]  # the prompt
        >>> for i in range(50, 100):
        ...     out.append(cache.attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1]))
        >>> torch.allclose(torch.cat(out, 1), dilated_attention(q, k, v, pattern, is_causal=True), atol=1e-5)
        True
        >>> cache
        DilatedCache(Pattern([8, 32], [1, 4]), kv_heads=4, seen=100, nbytes=2560)
    """

    def __init__(self, pattern: Pattern, kv_heads: int, *, rollback: int = 0, stored: str | None = None) -> None:
        check_pattern(pattern)
        check_decodable(pattern)
        self.pattern, self.kv_heads = pattern, integer("kv_heads", kv_heads, at_least=1)
        lengths, self._takes_any_length = [branch.forgets_every for branch in pattern.branches], pattern.only_segments
        self.rollback, self._most_rollback = integer("rollback", rollback, at_least=0), min(lengths)
        if self.rollback > (most := self._most_rollback):
            raise ValueError(f"rollback={rollback} must be at most the shortest segment of the pattern, {most} tokens")
        if pattern.only_segments and pattern.heads is None:  # ranges and layouts are of query heads, which the first rows have
            pattern.check_heads(self.kv_heads, self.kv_heads)
        if stored is not None:
            one_of("stored", stored, STORED["float32"])
        self.stored = stored
        self._layout: Layout | None = None
        self._step: PreparedStep | None = None
        self._facts: Hashable = None
        self._options: tuple[Any, ...] = ()
        self._rows = SequenceRows[Ring]((), self.rollback)
        self._period = WHOLE_SEQUENCE if WHOLE_SEQUENCE in lengths else math.lcm(*lengths)
        """Tokens after which all segments begin at once; a row at a multiple of it sees none before."""

    @property
    def seen(self) -> int:
        """Tokens that it has seen, of each sequence."""
        return self._rows.seen

    def __len__(self) -> int:
        return self.seen

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that some later row can still see, or one of the last `rollback`."""
        layout, rows = self._layout, self._rows
        if layout is None:
            return 0
        count = sum(ring.count_needed(max(0, rows.seen - self.rollback), rows.seen) for ring in rows.streams)
        return 2 * count * layout.batch * layout.width * layout.stored.itemsize

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the memory that is held for them, which grows with need.

        A branch doubles it when it is full, up to the rows that it needs; a window has up to 64 rows more where chunks come.
        """
        return sum(ring.rows.nbytes for ring in self._rows.streams)

    @in_given_dtypes
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sink: Tensor | None = None,
        scale: float | None = None,
        bias: Bias | None = None,
        softcap: float | None = None,
        backend: str | Sequence[str] | None = None,
    ) -> Tensor:
        """Attend with the next rows, `(batch, rows, heads, head_dim)` like `query`; remember their keys and values.

        - `query` `(batch, rows, heads, head_dim)`, `key` and `value` `(batch, rows, kv_heads, head_dim)`: one row, or a chunk of
          any length, such as a prompt. The last dimension is contiguous.
        - `sink`, `scale`: those of `dilated_attention`, which computes a prompt, by `backend` if it is given: the first rows, and
          with segments alone a chunk that begins where all of them do. Other rows are computed up to 64 at a time, each time in
          one call of a kernel (`DecodingBackend.attend_stored`), or in plain torch with a `backend` without such a kernel.
        - `bias`, `softcap`: those of `dilated_attention`, the same at each call; positions count from the first row seen.
          Coordinates are those of all rows so far and these, `(batch, seen + rows, 1 to 3)`. A grid has at least as many tokens.

        There are no gradients. Raises TypeError or ValueError for arguments that do not fit each other or the rows before; the
        cache is then as it was.
        """
        options = type(scale), type(softcap), type(backend), scale, softcap, backend
        if bias is None and (again := self._again(query, key, value, options)) is not None:
            if sink is not None:
                check_sink(sink, query)
            check_no_gradient(query, key, value, sink)
            return again.attend(self._rows, (query.resolve_neg(), key.resolve_neg(), value.resolve_neg()), sink, None)
        layout = self._checked(query, key, value, sink)
        if isinstance(bias, Bias) and bias.by_query:
            raise ValueError(f"bias={type(bias).__name__} has values for each query, of which caches keep none")
        changed = scores_of(bias, softcap, query, self.pattern, layout.kv_heads, self.seen + query.shape[1])
        check_no_gradient(query, key, value, sink, changed.tensors[0])
        query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()  # kernels of a step read memory
        scores = ScoreOptions(query.shape[-1] ** -0.5 if scale is None else real("scale", scale), changed, sink)
        check_scale(scores.scale, name_of(query.dtype))
        self._check_backend(query, key, scores, backend)
        is_prompt = query.shape[1] != 1 and self.seen % self._period == 0  # it sees no row before, and is worth a kernel
        step = None if is_prompt else self._prepared(layout, query, key, scores, backend)
        if self._layout != layout:  # nothing has been seen
            self._layout, self._rows = layout, open_rows(self.pattern, layout, self.rollback)
        self._facts, self._options = tensor_key((query, key, value)), options
        if step is not None and query.shape[1] == 1:
            return step.attend(self._rows, (query, key, value), sink, changed.bias)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        start, total = 0, query.shape[1]
        while start < total:
            by_step = step is not None and (total - start == 1 or self.seen % self._period > 0)
            part = slice(start, min(total, start + at_once(self._rows.streams, self.seen)) if by_step else total)
            rows = query[:, part], key[:, part], value[:, part]
            if step is not None and by_step:
                out[:, part] = step.attend(self._rows, rows, sink, changed.bias)
            else:
                out[:, part] = self._attend_prompt(rows, scores, layout, backend)
            start = part.stop
        return out

    def _again(self, query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]) -> PreparedStep | None:
        """Return the step of the row before, if the next one has its facts and its options, and the choice would be the same."""
        step = self._step
        if step is None or not self.seen or not self._are_as_before(query, key, value) or query.shape[1] != 1:
            return None
        if options != self._options or step.facts.bias is not None or torch._C._are_functorch_transforms_active():
            return None
        if not self._takes_any_length:
            self.pattern.check_seq(self.seen + 1)
        as_chosen = requested_backends(options[-1]) == step.facts.asked and state() == step.facts.state
        return step if as_chosen else None

    def _prepared(
        self, layout: Layout, query: Tensor, key: Tensor, scores: ScoreOptions, backend: str | Sequence[str] | None
    ) -> PreparedStep:
        chosen_by = requested_backends(backend), state()
        facts = StepFacts(layout, scores.scale, scores.changed.softcap, scores.changed.form, *chosen_by)
        if self._step is None or self._step.facts != facts:
            self._step = prepare(facts, query, key, self.pattern)
        return self._step

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`, as if the others had never been seen.

        This is always possible to `rollback` tokens before the longest length there has been, in one step or several with other
        rows between them. Further back it needs keys that are still kept: within the open segment of each branch, or where one
        begins. Raises ValueError where it is not possible; the cache is then as it was.
        """
        length = integer("length", length, at_least=0)
        if length > self.seen:
            raise ValueError(f"length={length} exceeds the {self.seen} tokens seen")
        longest, most = self._rows.longest, self._most_rollback
        if (ring := self._rows.lacking(length)) is not None:
            way_out = f"rollback can be {most} at most, so attend to the tokens again, or keep a copy (copy.deepcopy)"
            if longest - length <= most:
                way_out = f"a cache with rollback={longest - length} does"
            kept, first = ring.kept, ring.kept.needed(length)
            raise ValueError(
                f"length={length} needs keys from token {kept.tokens(range(first, first + 1))[0]} on, which the branch with "
                f"{kept.branch} keeps no more after {longest} tokens; {way_out}"
            )
        self._rows.crop(length)

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Make sequence i what was sequence `indices[i]`: the beams that go on. The batch becomes as large as there are indices.

        `indices` are integers `(new_batch,)`, at least 0 and less than the batch. Raises TypeError or ValueError for others.
        """
        chosen = integers("indices", indices)
        if self._layout is None:
            raise ValueError("indices: the cache is empty, with no sequences to choose from; call attend first")
        batch = self._layout.batch
        if not chosen or min(chosen) < 0 or max(chosen) >= batch:
            raise ValueError(f"indices={shown(chosen)} must be some of the {batch} sequences, from 0 to {batch - 1}")
        which = torch.tensor(chosen, device=self._layout.device)
        with torch.inference_mode(False):
            chosen_rows = [ring.rows.index_select(2, which) for ring in self._rows.streams]
        for ring, rows in zip(self._rows.streams, chosen_rows, strict=True):  # all or none: memory may not suffice
            ring.lay_out(rows)
        self._layout, self._facts = replace(self._layout, batch=len(chosen)), None

    def state_dict(self) -> CacheState:
        """Copy all that is kept to plain values and tensors, for `load_state_dict` or `torch.save`."""
        return state_of(self.pattern, self.kv_heads, self._layout, self.stored, self._rows)

    def load_state_dict(self, state: CacheState) -> None:
        """Restore a copy of a `state_dict` of a cache of the same pattern, `kv_heads` and `rollback`.

        Raises TypeError or ValueError for anything else, and leaves the cache as it was.
        """
        self._layout, self._rows = loaded(state, self.pattern, self.kv_heads, self.rollback, self.stored)
        self._facts = None

    def _check_backend(self, query: Tensor, key: Tensor, scores: ScoreOptions, backend: str | Sequence[str] | None) -> None:
        before = -self.seen % self._period
        needed = query.shape[1] - before > 1
        if needed or backend is not None:
            requested = requested_backends(backend)
        if needed and query.numel():
            prompt = Problem.of(query[:, before:], key, self.pattern, is_causal=True, scale=scores.scale)
            select(replace(prompt, softcap=scores.changed.softcap, bias=scores.changed.form), requested)

    def _attend_prompt(self, rows: Rows, scores: ScoreOptions, layout: Layout, backend: str | Sequence[str] | None) -> Tensor:
        query, key, value = rows
        if layout.stored != layout.dtype:  # halves would round the kept rows once more
            wide = lse_dtype(layout.dtype)
            rounded = query.to(wide), *(decoded(encoded(x, layout.stored), wide) for x in (key, value))
            query, key, value = (x.contiguous() for x in rounded)  # conversion permutes the strides of rows that overlap
        changed = scores.changed.of_rows(slice(self.seen, self.seen + key.shape[1]))
        inputs = Inputs(query, key, value, sink=scores.sink)
        out, _ = attend(*call_of(inputs, self.pattern, True, scores.scale, backend, scores=changed))
        self._rows.append_prompt(*rows[1:])
        self._rows.forget()
        return out.to(layout.dtype)

    def _checked(self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Layout:
        if torch._C._are_functorch_transforms_active():
            raise ValueError("a cache cannot keep the rows of vmap and other transforms; make the mapped dimension a batch")
        if self.seen and self._layout is not None and self._are_as_before(query, key, value):
            if sink is not None:
                check_sink(sink, query)
            self.pattern.check_seq(self.seen + query.shape[1])
            return self._layout
        check_inputs(Inputs(query, key, value, sink=sink), self.pattern)
        self.pattern.check_seq(self.seen + query.shape[1])
        if not query.dtype == key.dtype == value.dtype:
            raise TypeError(f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; one dtype is needed (.to(query))")
        (batch, _, heads, head_dim), kv_heads = query.shape, key.shape[2]
        if self.stored is not None and self.stored not in STORED[name_of(query.dtype)]:
            others = ", ".join(name for name, stored in STORED.items() if self.stored in stored)
            raise TypeError(f"query is {query.dtype}, but the cache has stored={self.stored!r}, which is for {others}")
        stored = query.dtype if self.stored is None else getattr(torch, self.stored)
        layout = Layout(batch, heads, kv_heads, head_dim, query.dtype, query.device, stored)
        wanted = self._layout if self._layout and self.seen else replace(layout, kv_heads=self.kv_heads)
        if layout != wanted:
            names = [f.name for f in fields(layout) if f.name != "stored"]  # which follows from the others
            differing = [name for name in names if getattr(layout, name) != getattr(wanted, name)]
            there, here = ([f"{name}={getattr(x, name)}" for name in differing] for x in (wanted, layout))
            raise ValueError(f"these rows have {', '.join(here)}, but the cache {', '.join(there)}; they need another cache")
        return layout

    def _are_as_before(self, *rows: Tensor) -> bool:
        for x in rows:
            if type(x) is not Tensor:
                return False
        return tensor_key(rows) == self._facts

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the step: a copy selects a backend for itself."""
        return {**self.__dict__, "_step": None, "_facts": None}

    def __copy__(self) -> DilatedCache:
        """Copy deeply: rows that one is given are not the other's."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"DilatedCache({self.pattern}, kv_heads={self.kv_heads}, seen={self.seen}, nbytes={self.nbytes})"
