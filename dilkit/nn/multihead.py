"""Multi-head dilated attention with its projections."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.bias.base import Bias
from dilkit.checks import boolean, integer, probability, real, shown
from dilkit.decoding import DilatedCache
from dilkit.nn.attention import DilatedAttention, appended, check_cache
from dilkit.nn.checks import accept_only, bool_mask, check_causal, check_factory, check_rows
from dilkit.op.sequences import check_cu_seqlens, places
from dilkit.packed.attention import is_nested, nested_like, packed_rows
from dilkit.pattern import Pattern
from dilkit.rotary import DEFAULT_BASE, even_head_dim, rotary_tables, rotate

if TYPE_CHECKING:
    from dilkit.nn.rank_heads import RankHeads

PACKED = "in_proj_weight"
APART = "q_proj_weight", "k_proj_weight", "v_proj_weight"

_FILLED_BY: weakref.WeakKeyDictionary[DilatedCache, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""The layer that each cache was given to last."""


class MultiheadDilatedAttention(nn.Module):
    """Multi-head dilated attention with the arguments, parameters and initialisation of `nn.MultiheadAttention`.

        out = out_proj(inner_norm(concat_h attention(q_h, k_h, v_h)))      q, k, v = in_proj(query, key, value)

    The weights load from `nn.MultiheadAttention` and back, packed or apart: the keys of the `state_dict` are the same. With the
    pattern `Pattern.dense()` the result is that of `nn.MultiheadAttention`. `dilkit.nn.HeadParallel` divides its heads over
    ranks.

    - `embed_dim`, `num_heads`: `head_dim = embed_dim / num_heads`.
    - `attention`: the inner attention, a module that is called as `attention(q, k, v, is_causal=, key_padding_mask=)` on tensors
      `(batch, seq, heads, head_dim)`, such as `DilatedAttention(pattern)`. Alternatively `segment_lengths` and `dilation_rates`
      mean `DilatedAttention(Pattern(segment_lengths, dilation_rates))`.
    - `num_kv_heads`: the number of key/value heads, a divisor of `num_heads`; key and value are projected to
      `num_kv_heads * head_dim`.
    - `bias`, `kdim`, `vdim`, `device`, `dtype`: as in `nn.MultiheadAttention`.
    - `layer_norm`: whether a LayerNorm over the concatenated heads precedes the output projection. It is the sub-LN of MAGNETO
      (arXiv 2210.06423), as in LongNet, without its initialisation gains. `layer_norm_eps` is its epsilon.
    - `rotary`: whether queries and keys get rotary embeddings (RoFormer, arXiv 2104.09864); a number is their base.
    - `sink`: whether each head has a learned sink, `sink` of `dilkit.dilated_attention`: the parameter `sinks` `(num_heads,)`, as
      gpt-oss calls it, 0 at first. The inner attention is then called with `sink=` too.
    - `is_causal`: the default of `forward`.
    - `dropout`: `dropout_p` of `dilkit.dilated_attention` in training mode. The inner attention is then called with `dropout_p=`
      too.
    - `add_bias_kv`, `add_zero_attn`, `batch_first`: only their default is supported, others are refused with a reason. That of
      `batch_first` is True, which is not torch's: a layer of torch's that holds this module has to be made with
      `batch_first=True` and given `(batch, seq, embed_dim)`. Nothing in a call tells the other order from it.

    Raises TypeError or ValueError naming the argument, its value and the limit.

    Example:

        >>> import torch
        >>> from dilkit import MultiheadDilatedAttention
        >>> layer = MultiheadDilatedAttention(32, 4, segment_lengths=[16, 64], dilation_rates=[1, 4], rotary=True)
        >>> x = torch.randn(2, 64, 32)  # (batch, seq, embed_dim)
        >>> out, weights = layer(x, x, x, is_causal=True)
        >>> out.shape, weights
        (torch.Size([2, 64, 32]), None)
        >>> layer.load_state_dict(torch.nn.MultiheadAttention(32, 4).state_dict())
        <All keys matched successfully>
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    sinks: nn.Parameter | None

    batch_first = True
    # nn.TransformerEncoderLayer reads this: False keeps the module out of its inference shortcut, which is dense attention.
    _qkv_same_embed_dim = False
    _rank_heads: RankHeads | None = None  # `HeadParallel` sets it

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: nn.Module | None = None,
        *,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        rotary: bool | float = False,
        sink: bool = False,
        is_causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        refused = dict(add_bias_kv=(add_bias_kv, False), add_zero_attn=(add_zero_attn, False))
        for name, (value, only) in {**refused, "batch_first": (batch_first, True)}.items():
            accept_only(name, value, only)
        for name, flag in dict(bias=bias, layer_norm=layer_norm, sink=sink, is_causal=is_causal).items():
            boolean(name, flag)
        self.dropout = probability("dropout", dropout)
        check_factory(device, dtype)
        self._set_sizes(embed_dim, num_heads, num_kv_heads, kdim, vdim)
        self.is_causal = is_causal
        self.rotary = _rotary_base(rotary, self.head_dim)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = _inner_attention(attention, segment_lengths, dilation_rates)
        self._make_in_projection(bias, factory)
        eps = real("layer_norm_eps", layer_norm_eps, above=0)
        self.inner_norm = nn.LayerNorm(self.embed_dim, eps=eps, **factory) if layer_norm else None
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)
        self.register_parameter("sinks", nn.Parameter(torch.empty(self.num_heads, **factory)) if sink else None)
        self._reset_parameters()

    def _set_sizes(self, embed_dim: int, num_heads: int, num_kv_heads: int | None, kdim: int | None, vdim: int | None) -> None:
        self.embed_dim = integer("embed_dim", embed_dim, at_least=1)
        self.num_heads = integer("num_heads", num_heads, at_least=1)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads, at_least=1)
        self.kdim = self.embed_dim if kdim is None else integer("kdim", kdim, at_least=1)
        self.vdim = self.embed_dim if vdim is None else integer("vdim", vdim, at_least=1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; each head needs equally many")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; each serves equally many")
        self.head_dim = self.embed_dim // self.num_heads

    def _make_in_projection(self, bias: bool, factory: dict[str, Any]) -> None:
        kv_dim = self.num_kv_heads * self.head_dim
        self._cuts, rows = (self.embed_dim, self.embed_dim + kv_dim), self.embed_dim + 2 * kv_dim
        packed = self.kdim == self.vdim == self.embed_dim
        shapes: dict[str, tuple[int, ...] | None] = {
            "in_proj_weight": (rows, self.embed_dim) if packed else None,
            "q_proj_weight": None if packed else (self.embed_dim, self.embed_dim),
            "k_proj_weight": None if packed else (kv_dim, self.kdim),
            "v_proj_weight": None if packed else (kv_dim, self.vdim),
            "in_proj_bias": (rows,) if bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory)))

    def _reset_parameters(self) -> None:
        """Draw the weights as `nn.MultiheadAttention` does, in its order: the same seed gives the same parameters."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool | None = None,
        positions: Tensor | None = None,
        cache: DilatedCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        score_bias: Bias | None = None,
    ) -> tuple[Tensor, None]:
        """Return `(output, None)`; `output` has the shape of `query`.

        - `query`: `(batch, seq, embed_dim)`, or `(seq, embed_dim)` without a batch; or a jagged tensor of `torch.nested`
          `(batch, j, embed_dim)`, which is computed as packed sequences, `key` and `value` with the same offsets.
        - `key` (default: `query`) and `value` (default: `key`): the same batch and length, with `kdim` and `vdim` columns.
        - `key_padding_mask`: bool `(batch, seq)`, or `(seq,)`, True = ignored; or the floating-point numbers 0 and -inf that
          `nn.TransformerEncoderLayer` makes of it.
        - `is_causal`: by default that of the constructor. `nn.TransformerEncoderLayer` passes False unless called with
          `is_causal=True`.
        - `attn_mask`: the causal mask `(seq, seq)` and no other, as torch's layers pass it beside the hint `is_causal`: bool,
          True above the diagonal, where no query may attend; or -inf there and 0 elsewhere. The call is causal then.
        - `positions`: the positions of the rotary embedding, integers `(seq,)` or `(batch, seq)`. By default they are
          0, 1, 2, ..., or the result of the inner attention's method `positions(seq, device)` if it has one, as over ranks.
        - `cache`: a `dilkit.DilatedCache` of the inner attention's pattern, for decoding: the rows are those that come next, see
          what the cache has kept, and are kept for later ones. Positions then go on from `cache.seen`.
        - `cu_seqlens`, `max_seqlen`: where sequences begin that are packed in `query` `(total, embed_dim)`, as in
          `dilkit.dilated_attention_varlen`. Each is attended to by itself, and its positions begin at 0.
        - `score_bias`: what is added to the scores in this call, `bias` of `dilkit.dilated_attention`, of all heads of the layer:
          a `CoordinateAlibi` of these rows, say. By default that of the inner attention, `DilatedAttention(pattern, bias=)`.
        - `need_weights`: only its default is supported, which is not torch's. `average_attn_weights` has no effect without it.

        Raises ValueError or TypeError for arguments that do not fit.
        """
        accept_only("need_weights", need_weights, False)
        if is_nested(query):
            others: Any = dict(key_padding_mask=key_padding_mask, attn_mask=attn_mask)
            others |= dict(positions=positions, cache=cache, max_seqlen=max_seqlen, score_bias=score_bias)
            return self._forward_nested(query, key, value, cu_seqlens, is_causal=is_causal, **others)
        key = query if key is None else key
        value = key if value is None else value
        weight = cast(Tensor, self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight)
        check_rows(weight, query=(query, self.embed_dim), key=(key, self.kdim), value=(value, self.vdim))
        key_padding_mask = bool_mask(key_padding_mask, query)
        causal = self._causal(is_causal, attn_mask, query, cache=cache, cu_seqlens=cu_seqlens)
        if cache is not None:
            self._check_cache(cache)
        if cu_seqlens is not None:
            self._plain_attention("cu_seqlens")
            if query.dim() != 2:
                raise ValueError(f"query has shape {tuple(query.shape)}; with cu_seqlens (total, {self.embed_dim}) is needed")
            check_cu_seqlens(cu_seqlens, query, query.shape[0])
        elif max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} is given without cu_seqlens, which says where sequences begin; give both")
        if positions is not None and self.rotary is None:
            raise ValueError("positions is given, but this module has no rotary positions; build it with rotary=True")
        q, k, v = self._project(query, key, value)
        if query.dim() == 2:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if self.rotary is not None:
            positions = self._positions(q, cache, cu_seqlens) if positions is None else positions
            tables = rotary_tables(q, positions, self.rotary)
            q, k = rotate(q, *tables), rotate(k, *tables)
        if score_bias is not None and self._rank_heads is not None:
            score_bias = score_bias.with_weights(self._rank_heads.part_of_all(score_bias.weights))
        options = self._options(bias=score_bias, cache=cache, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if cu_seqlens is not None:
            q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
        attended = self.attention(q, k, v, is_causal=causal, key_padding_mask=key_padding_mask, **options)
        out = attended.reshape(*query.shape[:-1], q.shape[-2] * self.head_dim)
        return self.out_proj(out if self.inner_norm is None else self.inner_norm(out)), None

    def _causal(self, is_causal: bool | None, attn_mask: Tensor | None, query: Tensor, **others: Any) -> bool:
        causal = self.is_causal if is_causal is None else is_causal
        if attn_mask is None:
            return causal
        for name, other in others.items():
            if other is not None:
                raise ValueError(f"attn_mask is given with {name}, whose rows are no whole sequence; use is_causal=True instead")
        self._plain_attention("attn_mask")
        check_causal(attn_mask, query)
        boolean("is_causal", causal)
        return True

    def _forward_nested(self, query: Tensor, key: Any, value: Any, cu_seqlens: Any, **options: Any) -> tuple[Tensor, None]:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given with a nested query, which says itself where its sequences begin; leave it out")
        nested = {name: x for name, x in dict(query=query, key=key, value=value).items() if x is not None}
        rows, starts = packed_rows(3, **nested)
        packed: dict[str, Any] = dict(zip(nested, rows, strict=True))
        out, _ = self.forward(**packed, **options, cu_seqlens=starts)
        if self._rank_heads is not None:
            out = out.clone()  # this waits for the sum over ranks, as a nested view does not
        return nested_like(query, out), None

    def _positions(self, q: Tensor, cache: Any, cu_seqlens: Tensor | None) -> Tensor | None:
        """Return the positions of the rows of `q` where the caller gives none; None: 0, 1, 2, ..."""
        of_attention: Any = getattr(self.attention, "positions", None)
        if cache is not None:
            return torch.arange(cache.seen, cache.seen + q.shape[1], device=q.device)
        if cu_seqlens is not None:
            return places(cu_seqlens, q.shape[1])
        return None if of_attention is None else of_attention(q.shape[1], q.device)

    def _options(self, **given: Any) -> dict[str, Any]:
        """Return arguments that the inner attention gets only where the module or the call has them."""
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.sinks is not None:
            options["sink"] = self.sinks if self._rank_heads is None else self._rank_heads.part(self.sinks)
        if self.training and self.dropout:
            options["dropout_p"] = self.dropout
        return options

    def _check_cache(self, cache: Any) -> None:
        check_cache(cache)
        self._plain_attention("cache")
        layer = _FILLED_BY.setdefault(cache, weakref.ref(self))() if cache.seen else None
        if layer not in (None, self):
            raise ValueError("cache has the rows of another layer; give each a cache of its own, or a copy (copy.copy(cache))")
        _FILLED_BY[cache] = weakref.ref(self)

    def _plain_attention(self, name: str) -> None:
        inner = self.attention
        if not isinstance(inner, DilatedAttention) or inner.orders is not None:
            raise ValueError(f"{name} is given, but the inner attention is {inner}; DilatedAttention(pattern) is needed")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Compute q, k and v, `(..., seq, heads, head_dim)`. In self-attention they are views of one product."""
        if self.in_proj_weight is not None and key is query and value is query:
            projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).tensor_split(self._cuts, dim=-1)
        else:
            if self._rank_heads is not None:
                query, key, value = self._rank_heads.rows(query, key, value)
            projected = tuple(map(F.linear, (query, key, value), *self._projections()))
        return tuple(x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim) for x in projected)

    def _projections(self) -> tuple[Sequence[Any], Sequence[Any]]:
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias, ranks = self.in_proj_bias, self._rank_heads
        if ranks is not None:
            return [*map(ranks.part, weights)], (None,) * 3 if bias is None else ranks.parts_of_bias(bias, self._cuts)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.tensor_split(self._cuts)
        return weights, (None,) * 3 if bias is None else bias.tensor_split(self._cuts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        lay_out(state_dict, prefix, self.in_proj_weight is not None, self._cuts)
        if self._rank_heads is not None:
            from dilkit.nn.rank_heads import distribute_values

            distribute_values(state_dict, prefix, self)
        super()._load_from_state_dict(state_dict, prefix, *others)

    @classmethod
    def from_torchscale(cls, module: nn.Module, *, tail: str = "zeros") -> MultiheadDilatedAttention:
        """Copy torchscale's `DilatedAttention`: its weights, pattern, device and dtype (`offset="block"`).

        `tail`: "zeros" computes what torchscale computes where segments are padded, "exact" attends to no padding. Raises
        TypeError for another module, ValueError for one with xPos, multiway weights, attention dropout or `seq_parallel`.
        """
        from dilkit.integrations.torchscale.weights import module_of

        return module_of(module, tail, cls)

    def to_torchscale_state_dict(self) -> dict[str, Tensor]:
        """Return the weights under the names of torchscale's `DilatedAttention`, which loads them with `load_state_dict`.

        Raises ValueError for what torchscale's module does not have, such as grouped heads, `rotary` or `offset="modulo"`.
        """
        from dilkit.integrations.torchscale.weights import torchscale_state_dict

        return torchscale_state_dict(self)

    def extra_repr(self) -> str:
        sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
        usual = dict(
            num_kv_heads=self.num_heads, kdim=self.embed_dim, vdim=self.embed_dim, dropout=0.0, rotary=None, is_causal=False
        )
        shown = {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}
        return sizes + appended(shown | ({} if self.sinks is None else dict(sink=True)))


def lay_out(state: MutableMapping[str, Tensor], prefix: str, packed: bool, cuts: Sequence[int]) -> None:
    """Put complete weights of the layer at `prefix` into `state` as the layer has them, packed or cut at rows `cuts`."""
    whole, parts = prefix + PACKED, [prefix + name for name in APART]
    if packed and whole not in state and all(name in state for name in parts):
        state[whole] = torch.cat([state.pop(name) for name in parts])
    elif not packed and whole in state and not any(name in state for name in parts):
        state.update(zip(parts, state.pop(whole).tensor_split(cuts), strict=True))


def _inner_attention(attention: Any, segment_lengths: Any, dilation_rates: Any) -> nn.Module:
    missing = (segment_lengths is None) + (dilation_rates is None)
    if missing != (0 if attention is None else 2):
        arguments = f"attention={shown(attention)} with segment_lengths={shown(segment_lengths)}"
        arguments += f" and dilation_rates={shown(dilation_rates)}"
        raise ValueError(f"give either attention, or both segment_lengths and dilation_rates, but not {arguments}")
    if attention is None:
        return DilatedAttention(Pattern(segment_lengths, dilation_rates))
    if not isinstance(attention, nn.Module):
        kind = type(attention).__name__
        raise TypeError(f"attention={shown(attention)} is a {kind}; a module such as DilatedAttention(pattern) is needed")
    return attention


def _rotary_base(rotary: bool | float, head_dim: int) -> float | None:
    if rotary is False:
        return None
    base = DEFAULT_BASE if rotary is True else real("rotary", rotary, above=1)  # with 1 all pairs turn alike
    even_head_dim(head_dim)
    return base
