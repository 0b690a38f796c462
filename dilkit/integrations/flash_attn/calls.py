"""A call of flash-attn as calls of dilkit: its arguments checked by their names there, the diagonal aligned to the lower right.

row i of n, of keys m      sees keys  i + m - n - left .. i + m - n + right      bias = -slope * |i + m - n - j|
S_dmask[i, j] = exp(score[i, j] - max_j score[i, j]), negative where the weight is dropped
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilkit.attention import dilated_attention
from dilkit.backend import Backend
from dilkit.bias.alibi import Alibi
from dilkit.bias.checks import floating
from dilkit.checks import boolean, integer, integers, probability, real
from dilkit.op.boundary import TORCH_DTYPES, check_device, check_tensor, in_rows, lse_dtype
from dilkit.op.dropout import Dropout, draw_seed
from dilkit.op.sequences import check_cu_seqlens, checked_longest
from dilkit.oracle import oracle_attention
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern, SlidingWindow
from dilkit.problem import DTYPES
from dilkit.registry import backends, list_backends
from dilkit.selector import requested_backends

Results = tuple[Tensor, Tensor, Tensor | None]
"""`(out, softmax_lse, S_dmask)`: without dropout there is no S_dmask."""
Result = Tensor | Results
"""`out`, or all with `return_attn_probs`."""


def tensors_of(shape: str, **given: Any) -> list[Tensor]:
    """Return tensors of a shape such as "(batch, seqlen, heads, head_dim)", as kernels read them.

    Raises TypeError or ValueError, naming the argument, for other tensors, and for those unlike the first of them.
    """
    first_name, first = next(iter(given.items()))
    for name, x in given.items():
        check_tensor(name, x)
        if "float8" in str(x.dtype):
            raise TypeError(f"{name} is {x.dtype}; dilkit does not compute FP8, use {name}.to(torch.bfloat16)")
        if x.dtype not in TORCH_DTYPES or x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name} is {x.dtype}, {x.layout}; a plain tensor of {', '.join(DTYPES)} is needed")
        if x.dim() != shape.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {shape} is needed")
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; {first.dtype} on {first.device} is needed, as {first_name} is")
    return [in_rows(x) for x in given.values()]


def unpacked(name: str, x: Any, shape: str) -> list[Tensor]:
    """Return the views of a tensor such as "(batch, seqlen, 3, heads, head_dim)" along its third last dimension."""
    [packed] = tensors_of(shape, **{name: x})
    count = int(shape.split(", ")[-3])
    if packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; {shape} is needed")
    return list(packed.unbind(-3))


def check_fit(q: Tensor, k: Tensor, v: Tensor, k_name: str = "k", v_name: str = "v") -> None:
    """Raise ValueError, naming the argument, unless the sizes of query, key and value go together; lengths may differ."""
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{v_name} has shape {tuple(v.shape)} and {k_name} {tuple(k.shape)}; only head_dim may differ")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{k_name} has {kv_heads} heads and q {heads}; a divisor of those of q is needed")
    if q.shape[-1] != k.shape[-1] or 0 in (q.shape[-1], v.shape[-1]):
        raise ValueError(f"{k_name} has head_dim {k.shape[-1]} and q {q.shape[-1]}; they must be equal, and at least 1")


def check_starts(name: str, starts: Any, longest_name: str, longest: Any, rows: Tensor, of: str) -> None:
    """Raise TypeError or ValueError unless `starts` cuts `rows`, those of `of`, into sequences of at most `longest`.

    Numbers on a GPU are left to the call itself.
    """
    total = rows.shape[0]
    check_cu_seqlens(starts, rows, total, name, of)
    most = integer(longest_name, longest, at_least=0)
    if starts.device.type == "cpu" and (length := checked_longest(starts, total, name, of)) > most:
        raise ValueError(f"{longest_name}={most}, but {name} has a sequence of {length} rows; at least that is needed")


@dataclass(frozen=True)
class Options:
    """The options of a call, checked and under flash-attn's names. Raises TypeError or ValueError, naming the argument."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool = False
    return_attn_probs: bool = False

    def __post_init__(self) -> None:
        for name in ("causal", "deterministic", "return_attn_probs"):
            boolean(name, getattr(self, name))
        probability("dropout_p", self.dropout_p)
        if self.softmax_scale is not None:
            real("softmax_scale", self.softmax_scale)
        if real("softcap", self.softcap) < 0:
            raise ValueError(f"softcap={self.softcap} must be at least 0; 0 caps nothing")
        sides = integers("window_size", self.window_size)
        if len(sides) != 2:
            raise ValueError(
                f"window_size={self.window_size} has {len(sides)} numbers; (left, right) is needed, -1 for an open side"
            )
        left, right = (max(side, -1) for side in sides)
        object.__setattr__(self, "window_size", (left, 0 if self.causal else right))

    @property
    def is_local(self) -> bool:
        """True where rows differ in the keys that they see."""
        return self.window_size != (-1, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
        """Compute sequences of one length, `(batch, seqlen, heads, head_dim)`."""
        slopes = self.slopes(q, q.shape[0])
        if slopes is None or slopes.dim() == 1:
            return self._returned(self.attend_alike(q, k, v, slopes))
        parts = [self.attend_alike(q[b : b + 1], k[b : b + 1], v[b : b + 1], slope) for b, slope in enumerate(slopes)]
        return self._returned(joined(parts, 0))

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, longest: int) -> Result:
        """Compute packed sequences, `(total, heads, head_dim)`."""
        if starts.shape != starts_k.shape:
            raise ValueError(f"cu_seqlens_k is of {len(starts_k) - 1} sequences and cu_seqlens_q of {len(starts) - 1}")
        slopes = self.slopes(q, len(starts) - 1)
        is_by_sequence = slopes is not None and slopes.dim() == 2
        if is_by_sequence or (self.return_attn_probs and self.dropout_p and len(starts) > 1):
            for name, begin, x in (("cu_seqlens_q", starts, q), ("cu_seqlens_k", starts_k, k)):
                checked_longest(begin, len(x), name, name[-1])
            each: Any = slopes if is_by_sequence else repeat(slopes, len(starts) - 1)
            spans = zip(pairwise(starts.tolist()), pairwise(starts_k.tolist()), each, strict=True)
            parts = [self.attend_alike(q[None, a:b], k[None, c:d], v[None, c:d], slope) for (a, b), (c, d), slope in spans]
            out, lse, signed = joined(parts, 1)
            return self._returned((out.squeeze(0), lse.squeeze(0), signed))
        is_square = starts is starts_k or torch.equal(starts, starts_k)
        window = self._window(len(q), len(k), slopes is not None and not is_square)
        options = self._options(q, slopes, window)
        if not is_square:
            offsets = (starts_k.diff() - starts.diff()).int() if window.by_position or slopes is not None else None
            options |= dict(cu_seqlens_k=starts_k.contiguous(), query_offset=offsets)
        out, lse = dilated_attention_varlen(q, k, v, cu_seqlens=starts.contiguous(), max_seqlen=longest, **options)
        return self._returned((out, lse, None))

    def attend_alike(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Results:
        """Compute a batch whose sequences have the same slopes."""
        rows, keys = q.shape[1], k.shape[1]
        window = self._window(rows, keys, slopes is not None and rows > keys)
        offset = keys - rows if window.by_position or slopes is not None else None
        options = self._options(q, slopes, window)
        signed = self._signed(q, k, offset, options) if self.return_attn_probs and self.dropout_p else None
        out, lse = dilated_attention(q, k, v, query_offset=offset, **options)
        return out, lse, signed

    @torch.no_grad()
    def _signed(self, q: Tensor, k: Tensor, offset: int | None, options: dict[str, Any]) -> Tensor:
        """Return S_dmask of the call that follows, which draws the same seed: `(batch, heads, rows, keys)`."""
        with torch.random.fork_rng(devices=[]):
            dropout = Dropout(self.dropout_p, int(draw_seed()))
        one_hot = torch.eye(k.shape[1], device=k.device)[None, :, None].expand(-1, -1, k.shape[2], -1)
        named = {name: options[name] for name in ("pattern", "is_causal", "bias", "scale", "softcap")}
        named |= dict(query_offset=offset, dtype=str(lse_dtype(q.dtype)).removeprefix("torch."))
        whole, thinned = (oracle_attention(q, k, one_hot, dropout=by, **named)[0] for by in (None, dropout))
        signed = torch.where(thinned == 0, -whole, whole)
        if signed.numel():
            signed /= whole.amax(-1, keepdim=True).clamp(min=torch.finfo(whole.dtype).tiny)  # of rows that see nothing
        return signed.transpose(1, 2).to(q.dtype)

    def slopes(self, q: Tensor, batch: int) -> Tensor | None:
        """Return the checked `alibi_slopes`, `(heads,)` or `(batch, heads)`, or None if there are none or the batch is empty."""
        slopes, heads = self.alibi_slopes, q.shape[-2]
        if slopes is None:
            return None
        floating("alibi_slopes", slopes, (1, 2), "(heads,) or (batch, heads)")
        if slopes.shape not in ((heads,), (batch, heads)):
            needed = f"(heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}) is needed"
            raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}; {needed}")
        check_device("alibi_slopes", slopes, q)
        return slopes if batch else None

    def _window(self, rows: int, keys: int, before_keys: bool) -> Window:
        left, right = self.window_size
        return window_of(-1 if left >= keys else left, -1 if right >= rows else right, before_keys)

    def _options(self, q: Tensor, slopes: Tensor | None, window: Window) -> dict[str, Any]:
        bias = None if slopes is None else Alibi(slopes)
        backend = reproducible_backends() if self.deterministic and q.device.type == "cuda" else None
        options = dict(pattern=window.pattern, is_causal=window.is_causal, bias=bias, backend=backend, return_lse=True)
        return dict(options, scale=self.softmax_scale, dropout_p=self.dropout_p, softcap=self.softcap or None)

    def _returned(self, results: Results) -> Result:
        return results if self.return_attn_probs else results[0]


def joined(parts: list[Results], dim: int) -> Results:
    """Join the results of several calls, those of rows along `dim`; matrices are filled up with zeros."""
    outs, lses, matrices = zip(*parts, strict=True)
    signed = None
    if matrices[0] is not None:
        rows, keys = (max(x.shape[n] for x in matrices) for n in (2, 3))
        signed = torch.cat([pad(x, (0, keys - x.shape[3], 0, rows - x.shape[2])) for x in matrices])
    return torch.cat(outs, dim), torch.cat(lses, 2 * dim), signed


class Window(NamedTuple):
    """The pattern of a window; `by_position`: the positions of queries among the keys decide, also where it is not causal."""

    pattern: Pattern
    is_causal: bool
    by_position: bool


def _window_of(left: int, right: int, before_keys: bool = False) -> Window:
    """Return the window of these sides, -1 for an open one.

    Without a window all rows see all keys: a dense pattern, unless rows have positions `before_keys`, which that does not reach.
    """
    if right == 0:
        return Window(Pattern.dense() if left == -1 else Pattern.of(SlidingWindow(left + 1)), True, False)
    if left == right == -1 and not before_keys:
        return Window(Pattern.dense(), False, False)
    return Window(Pattern.of(SlidingWindow(before=left, after=right)), False, True)


window_of: Callable[..., Window] = torch.compiler.disable(lru_cache(maxsize=256)(_window_of))
"""The same, kept; torch.compile, which cannot trace patterns, breaks its graph there."""


def reproducible_backends() -> tuple[str, ...] | None:
    """Return the backends that give the same bits in every run on a GPU, best first; None where others are asked for by name."""
    if requested_backends():
        return None
    known = backends()
    names = [name for name in list_backends() if isinstance(known[name], Backend)]
    return tuple(name for name in names if name == "reference" or known[name].reproducible)  # type: ignore[union-attr]
