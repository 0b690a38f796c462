"""flash-attn's function for decoding: rotary positions, new rows written into the cache, then attention to what it holds."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dilkit.bias.alibi import Alibi
from dilkit.checks import boolean, integer
from dilkit.decoding.kvcache import dilated_attention_with_kvcache
from dilkit.decoding.layout import check_no_gradient
from dilkit.integrations.flash_attn.calls import Options, check_fit, joined, tensors_of, window_of
from dilkit.integrations.flash_attn.pages import check_table, places
from dilkit.op.boundary import check_device, check_tensor, lse_dtype, span
from dilkit.op.overlap import check_places, check_written
from dilkit.rotary import rotate

_ROWS = "(batch, rows, heads, head_dim)"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of new queries to a cache, as flash-attn's function of this name, on any device. It has no gradient.

    The last row of `q` is aligned with the last key of its sequence, in the cache or in `k`.

    Args:
        q: `(batch, rows, heads, head_dim)`.
        k_cache: `(batch, capacity, heads_k, head_dim)`, or pages `(blocks, page, heads_k, head_dim)` with `block_table`.
        v_cache: As `k_cache`.
        k: `(batch, new, heads_k, head_dim)`, written into `k_cache` from `cache_seqlens` on; None for no new rows.
        v: As `k`, for `v_cache`.
        rotary_cos: `(positions, rotary_dim / 2)`. `k` is rotated by its positions, from `cache_seqlens` on. So is `q` with
            `causal` or a window; otherwise all its rows are at `cache_seqlens`. Dimensions beyond `rotary_dim` stay.
        rotary_sin: As `rotary_cos`.
        cache_seqlens: Rows of each sequence in the cache, int32 `(batch,)`, or one number; by default the cache is full.
        cache_batch_idx: int32 `(batch,)`: the row of the cache of each sequence; by default its own.
        cache_leftpad: int32 `(batch,)`: the first row of each sequence; rows before are not seen.
        block_table: int32 `(batch, pages)`: the block of each page of each sequence.
        softmax_scale: This and `causal`, `window_size`, `softcap` and `alibi_slopes` are those of `flash_attn_func`.
        rotary_interleaved: Rotate pairs of neighbours (GPT-J); otherwise the two halves (NeoX).
        num_splits: Division of the work on a GPU in flash-attn, without an effect here.
        return_softmax_lse: Return `(out, softmax_lse)`.

    Returns:
        `out`, `(batch, rows, heads, head_dim)`; `softmax_lse` is `(batch, heads, rows)`.

    Raises:
        TypeError, ValueError: Arguments that do not fit, and tensors that require a gradient. The cache is then unchanged.

    Example:

        >>> import torch
        >>> from dilkit.integrations.flash_attn import flash_attn_with_kvcache
        >>> (k_cache, v_cache), q = torch.zeros(2, 1, 64, 2, 16), torch.randn(1, 3, 4, 16)
        >>> k, v = torch.randn(2, 1, 3, 2, 16)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=10, causal=True).shape
        torch.Size([1, 3, 4, 16])
        >>> torch.equal(k_cache[:, 10:13], k)
        True
    """
    call = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    boolean("return_softmax_lse", return_softmax_lse)
    integer("num_splits", num_splits, at_least=0)
    if (k is None) != (v is None):
        raise ValueError("k and v go together: give both, or neither where the cache has them already")
    written = dict(k_cache=k_cache, v_cache=v_cache)
    q, *caches = tensors_of(_ROWS, q=q, **written)
    for (name, x), cache in zip(written.items(), caches, strict=True):
        if cache is not x:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension; 1 is needed, as it is written in place")
    check_fit(q, k_cache, v_cache, "k_cache", "v_cache")
    new = [] if k is None else tensors_of(_ROWS, q=q, k=k, v=v)[1:]
    for name, x, cache in zip(("k", "v"), new, caches, strict=False):
        if x.shape != (wanted := (q.shape[0], new[0].shape[1], *cache.shape[2:])):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {wanted} is needed: rows of the cache")
    check_no_gradient(q, k_cache, v_cache, *new, alibi_slopes)
    held = _Cache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, new)
    if rotary_cos is not None or rotary_sin is not None:
        boolean("rotary_interleaved", rotary_interleaved)
        if not new:
            raise ValueError("rotary_cos is given without k and v; rotate q before the call")
        tables, rows = _rotary_tables(q, rotary_cos, rotary_sin), range(q.shape[1]) if call.is_local else [0] * q.shape[1]
        q = _rotated(q, tables, held.lengths, rows, rotary_interleaved)
        new[0] = _rotated(new[0], tables, held.lengths, range(new[0].shape[1]), rotary_interleaved)
    out, lse = held.attend(q, new, call)
    return (out, lse) if return_softmax_lse else out


class _Cache:
    """The rows of each sequence in the cache. Raises TypeError or ValueError, naming the argument, where it does not fit."""

    def __init__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, seqlens: Any, index: Any, leftpad: Any, table: Any, new: list[Tensor]
    ) -> None:
        self.caches, batch, appended = (k_cache, v_cache), q.shape[0], new[0].shape[1] if new else 0
        if table is not None and index is not None:
            raise ValueError("cache_batch_idx goes with no block_table, which says itself where each sequence is")
        self.table = None if table is None else check_table(table, q, batch)
        self.is_own = table is None and index is None and leftpad is None
        if table is None and index is None and k_cache.shape[0] != batch:
            raise ValueError(f"k_cache has batch {k_cache.shape[0]} and q {batch}; name the row of each in cache_batch_idx")
        capacity = k_cache.shape[1] * (1 if self.table is None else self.table.shape[1])
        if seqlens is None and new:
            raise ValueError("k and v are given without cache_seqlens; rows of each sequence in the cache are needed")
        if not isinstance(seqlens, Tensor):
            seqlens = capacity if seqlens is None else integer("cache_seqlens", seqlens)
            seqlens = torch.full((batch,), min(max(seqlens, -1), 2**31 - 1), dtype=torch.int32, device=q.device)
        self.seqlens, self.lengths = seqlens, _numbers("cache_seqlens", seqlens, q, [capacity - appended] * batch)
        self.ends = [length + appended for length in self.lengths]
        self.index = [*range(batch)] if index is None else _numbers("cache_batch_idx", index, q, [len(k_cache) - 1] * batch)
        self.starts = [0] * batch if leftpad is None else _numbers("cache_leftpad", leftpad, q, self.ends)

    def attend(self, q: Tensor, new: list[Tensor], call: Options) -> tuple[Tensor, Tensor]:
        """Write new rows, and compute `(out, softmax_lse)` of `q`. The cache is as it was if that fails."""
        slopes, (left, right), (k_cache, v_cache) = call.slopes(q, q.shape[0]), call.window_size, self.caches
        is_plain = self.is_own and k_cache.shape == v_cache.shape and (slopes is None or slopes.dim() == 1)
        if is_plain and (right == 0 or q.shape[1] == 1) and q.numel() and min(self.ends) >= q.shape[1]:
            pattern = window_of(-1 if left >= k_cache.shape[1] else left, 0).pattern
            key, value = new or (None, None)
            scores: dict[str, Any] = dict(scale=call.softmax_scale, bias=None if slopes is None else Alibi(slopes))
            scores |= dict(softcap=call.softcap or None, key=key, value=value, cache_seqlens=self.seqlens.contiguous())
            results = dilated_attention_with_kvcache(q, k_cache, v_cache, pattern, **scores, return_lse=True)
            return cast(tuple[Tensor, Tensor], results)
        if new:
            tensors = dict(zip(("k_cache", "v_cache", "q", "k", "v"), (*self.caches, q, *new), strict=True))
            check_places(("k_cache", "v_cache"), tensors)
            check_written(("k_cache", "v_cache"), tuple(tensors), tuple(tensors.values()), tuple(map(span, tensors.values())))
        places = self._places(new)
        before = [cache[places] for cache in self.caches]
        for cache, rows in zip(self.caches, new, strict=False):
            cache[places] = rows
        try:
            return self._attend_each(q, call, slopes)
        except BaseException:
            for cache, rows in zip(self.caches, before, strict=True):
                cache[places] = rows
            raise

    def _attend_each(self, q: Tensor, call: Options, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.is_own and len({*self.ends}) == 1 and (slopes is None or slopes.dim() == 1):
            key, value = (cache[:, : self.ends[0]] for cache in self.caches)
            return call.attend_alike(q, key, value, slopes)[:2]
        parts = []
        for b, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            slope = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
            key, value = (self._sequence(cache, b, end)[None, start:end] for cache in self.caches)
            parts.append(call.attend_alike(q[b : b + 1], key, value, slope))
        if not parts:
            out = q.new_empty(0, *q.shape[1:3], self.caches[1].shape[-1])
            return out, q.new_empty(0, *q.shape[2:0:-1], dtype=lse_dtype(q.dtype))
        return joined(parts, 0)[:2]

    def _sequence(self, cache: Tensor, b: int, end: int) -> Tensor:
        """Return the rows of a sequence: a view of the cache, or a copy out of its pages."""
        if self.table is None:
            return cache[self.index[b]]
        page = cache.shape[1]
        first = torch.arange(0, end, page, device=cache.device)
        block, _ = places(self.table, torch.full_like(first, b), first, page, cache.shape[0])
        return cache[block].flatten(0, 1)

    def _places(self, new: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the row of the cache, or the block, of each new row, and the row in it."""
        device = self.caches[0].device
        rows = new[0].shape[1] if new else 0
        position = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(rows, device=device)
        if self.table is None:
            block, row = torch.tensor(self.index, device=device)[:, None].expand_as(position), position
        else:
            sequence = torch.arange(len(position), device=device)[:, None].expand_as(position)
            block, row = places(self.table, sequence, position, *self.caches[0].shape[1::-1])
        if len({*zip(block.flatten().tolist(), row.flatten().tolist(), strict=True)}) < row.numel():
            name = "cache_batch_idx" if self.table is None else "block_table"
            raise ValueError(f"by {name} two sequences write k and v into one row of the cache; give each rows of its own")
        return block, row


def _numbers(name: str, x: Any, q: Tensor, most: list[int]) -> list[int]:
    """Return the numbers of an int32 tensor `(batch,)`. Raises TypeError or ValueError for others, and beyond 0 to `most`."""
    tensor = check_tensor(name, x, "an int32 torch.Tensor (batch,)")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} is {tensor.dtype}; torch.int32 is needed ({name}.int())")
    if tensor.shape != q.shape[:1]:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; (batch,) = ({q.shape[0]},) is needed")
    check_device(name, tensor, q)
    numbers: list[int] = tensor.tolist()
    for b, (number, limit) in enumerate(zip(numbers, most, strict=True)):
        if not 0 <= number <= limit:
            raise ValueError(f"{name}[{b}]={number}; 0 to {limit} is needed")
    return numbers


def _rotary_tables(q: Tensor, cos: Any, sin: Any) -> list[Tensor]:
    """Return the tables `(positions, rotary_dim / 2)`. Raises TypeError or ValueError for others."""
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin go together: give both, or neither")
    cos, sin = tensors_of("(positions, rotary_dim / 2)", rotary_cos=cos, rotary_sin=sin)
    check_device("rotary_cos", cos, q)
    if cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        shapes = f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}"
        raise ValueError(f"{shapes}; (positions, rotary_dim / 2) is needed, rotary_dim at most head_dim={q.shape[-1]}")
    return [cos, sin]


def _rotated(x: Tensor, tables: list[Tensor], lengths: list[int], rows: Any, interleaved: bool) -> Tensor:
    """Rotate `x` by the positions `lengths + rows`."""
    if len(rows) and lengths and (last := max(lengths) + max(rows)) >= len(tables[0]):
        raise ValueError(f"rotary_cos is of {len(tables[0])} positions; position {last} is needed: make it longer")
    position = torch.tensor(lengths, device=x.device)[:, None] + torch.tensor([*rows], dtype=torch.int64, device=x.device)
    dtype = torch.promote_types(torch.float32, x.dtype)
    cos, sin = (table.to(dtype)[position][:, :, None] for table in tables)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        turned = turned.reshape(*x.shape[:-1], half, 2).mT.flatten(-2)
    turned = rotate(turned, cos, sin)
    if interleaved:
        turned = turned.reshape(*x.shape[:-1], 2, half).mT.flatten(-2)
    return torch.cat((turned, rest), -1)
