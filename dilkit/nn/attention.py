"""Dilated attention alone, as a module without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dilkit.attention import dilated_attention
from dilkit.bias.base import Bias
from dilkit.checks import check_type, real
from dilkit.decoding import DilatedCache
from dilkit.op.arguments import check_pattern
from dilkit.op.scores import check_softcap
from dilkit.orders.attention import ordered_dilated_attention
from dilkit.orders.heads import order_or_orders, shown_orders
from dilkit.orders.token_order import TokenOrder
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern
from dilkit.selector import names_of

if TYPE_CHECKING:
    from dilkit.nn.rank_heads import RankHeads

_WHY_NOT = {
    ("cache", "key_padding_mask"): "which keeps no mask; give shorter sequences another cache",
    ("cache", "return_lse"): "which returns the result alone; leave it out",
    ("cu_seqlens", "cache"): "but a cache is of sequences of one length; give each sequence its own",
    ("cu_seqlens", "key_padding_mask"): "but packed sequences have no mask; leave the masked tokens out",
}


class BiasedModule(nn.Module):
    """An inner attention: its pattern, its options and its bias, whose weights are `bias_weights` of the state dict.

    They are a parameter if they are an `nn.Parameter`; other tensors that require a gradient are refused. Raises TypeError or
    ValueError for what does not fit.
    """

    bias_weights: Tensor
    of_model: Bias | None
    """The bias that was given, of all heads of the model."""
    _rank_heads: RankHeads | None = None
    """The heads of the rank that the bias is restricted to; `HeadParallel` sets them."""

    def __init__(
        self,
        pattern: Pattern,
        *,
        order: TokenOrder | None = None,
        orders: Sequence[TokenOrder] | None = None,
        scale: float | None = None,
        bias: Bias | None = None,
        softcap: float | None = None,
        backend: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_pattern(pattern)
        self.pattern = pattern
        self.orders = order_or_orders(order, orders)
        self.scale = None if scale is None else real("scale", scale)
        self.softcap = check_softcap(softcap) or None
        if backend is not None:
            names_of(backend)  # raises for what are no names
        self.backend = backend
        check_type("bias", bias, (Bias, type(None)), "a value such as dilkit.Alibi is needed")
        self.of_model = bias
        weights = None if bias is None else bias.weights
        if bias is not None and bias.weights.requires_grad and not isinstance(weights, nn.Parameter):  # a buffer trains nothing
            name, way = f"{bias.weights_name} of the bias", "make them an nn.Parameter, or give the bias in each call"
            if bias.by_query:
                raise ValueError(f"{name} require a gradient, but are of the queries of one call; give the bias in that call")
            raise ValueError(f"{name} require a gradient, but are no parameter, of which a module would keep a copy; {way}")
        if weights is None or isinstance(weights, nn.Parameter):
            self.register_parameter("bias_weights", weights)
        else:
            self.register_buffer("bias_weights", weights)

    @property
    def bias(self) -> Bias | None:
        """The bias with the weights that this module has now, of the heads that it computes."""
        if self.of_model is None:
            return None
        weights, ranks = self.bias_weights, self._rank_heads
        return self.of_model.with_weights(weights if ranks is None else ranks.part_of_all(weights))


class DilatedAttention(BiasedModule):
    """`dilkit.dilated_attention` as a module, without parameters but a bias: the inner attention of `MultiheadDilatedAttention`.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v

    `pattern`, `scale`, `softcap` and `backend` are those of `dilkit.dilated_attention`; `bias` is added to the scores unless
    `forward` is given another. Its slopes or table are `bias_weights` of the state dict, a parameter if they are an
    `nn.Parameter`, else a buffer, which may require no gradient. With `order`, a `dilkit.order` of the tokens' grid, or several
    `orders`, which the heads use in turn, it is `dilkit.ordered_dilated_attention`. Raises TypeError or ValueError, naming the
    argument, for what does not fit.

    Example:

        >>> import torch
        >>> from dilkit import DilatedAttention, Pattern
        >>> attention = DilatedAttention(Pattern([16, 64], [1, 4]))
        >>> q = k = v = torch.randn(2, 64, 4, 8)  # (batch, seq, heads, head_dim)
        >>> attention(q, k, v, is_causal=True).shape
        torch.Size([2, 64, 4, 8])
        >>> attention
        DilatedAttention(Pattern([16, 64], [1, 4]))
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        bias: Bias | None = None,
        cache: DilatedCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `dilated_attention(query, key, value, self.pattern, ...)` on tensors `(batch, seq, heads, head_dim)`.

        A `bias` takes the place of the module's own. With `cu_seqlens` it is `dilated_attention_varlen`, on tensors
        `(total, heads, head_dim)`; with a `cache` of the pattern `cache.attend` of the next rows, which is causal.
        """
        options: dict[str, Any] = dict(sink=sink, scale=self.scale, softcap=self.softcap, backend=self.backend)
        options["bias"] = self.bias if bias is None else bias
        if cu_seqlens is not None:
            self._check_alone("cu_seqlens", key_padding_mask=key_padding_mask, cache=cache)
            options.update(is_causal=is_causal, dropout_p=dropout_p, return_lse=return_lse)
            return dilated_attention_varlen(query, key, value, self.pattern, cu_seqlens, max_seqlen, **options)
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen={max_seqlen} is given without cu_seqlens, which says where sequences begin; give both")
        if cache is not None:
            self._check_alone("cache", key_padding_mask=key_padding_mask, return_lse=return_lse or None)
            self._check_cache(cache, is_causal, dropout_p)
            return cache.attend(query, key, value, **options)
        options.update(is_causal=is_causal, dropout_p=dropout_p, return_lse=return_lse, key_padding_mask=key_padding_mask)
        if self.orders is not None:
            return ordered_dilated_attention(query, key, value, self.pattern, self.orders, **options)
        return dilated_attention(query, key, value, self.pattern, **options)

    def _check_alone(self, name: str, **others: object) -> None:
        if self.orders is not None:
            raise ValueError(f"{name} is given, but the attention is along token orders; DilatedAttention(pattern) is needed")
        for other, given in others.items():
            if given is not None:
                raise ValueError(f"{other} is given with {name}, {_WHY_NOT[name, other]}")

    def _check_cache(self, cache: DilatedCache, is_causal: bool, dropout_p: float) -> None:
        check_cache(cache)
        if cache.pattern != self.pattern:
            raise ValueError(f"cache is of {cache.pattern}, but the inner attention has {self.pattern}; one pattern is needed")
        if not is_causal:
            raise ValueError("cache is given, but is_causal=False; decoding is causal (is_causal=True)")
        if dropout_p:
            raise ValueError(f"cache is given with dropout_p={dropout_p:g}; decoding drops nothing: call eval() of the layer")

    def extra_repr(self) -> str:
        options = {**shown_orders(self.orders), "scale": self.scale, "bias": self.of_model and type(self.of_model).__name__}
        options |= {"softcap": self.softcap, "backend": self.backend}
        return str(self.pattern) + appended({name: value for name, value in options.items() if value is not None})


def check_cache(cache: object) -> None:
    check_type("cache", cache, DilatedCache, "a dilkit.DilatedCache is needed, one for each layer")


def appended(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())
