"""Attention with relative positions that depend on the query, in models of transformers: Transformer-XL's, Shaw's and SAM's.

    score = scaling * (q_i . k_j + q'_i . r_(i - j))        SAM: scaling * q_i . k_j + q_i . r_(y_i - y_j) + q_i . s_(x_i - x_j)

Their modules make a tensor of all pairs before they look attention up by name. Here the products q' r are a `RowTable`, which has
as many columns as distances that the pattern reaches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.bias.rows import RowTable
from dilkit.integrations.transformers.conversion import Conversion, ConvertedLayer
from dilkit.integrations.transformers.patterns import DENSE, checked
from dilkit.pattern import Pattern, SlidingWindow

_UNCHANGED = frozenset({"output_hidden_states", "return_dict", "use_cache"})
"""Options of a layer's call that change nothing in attention."""
_AGREES = 1e-4
"""The largest difference of a layer from its own forward, relative to the largest result: some compute a softmax in float32."""


def convert_relative(model: Any, pattern: Pattern | str | Sequence[Pattern | str] | None = None) -> Conversion:
    """Let the layers of `model` with relative positions compute dilated attention from now on; their weights stay as they are.

    They are those of Parakeet, Wav2Vec2-BERT, Wav2Vec2-Conformer, SeamlessM4T's speech encoders and SAM's vision encoders, found
    by the names of their classes. Each is given a class of its own, which is not saved: a model that is loaded is converted
    again. Keys that the model pads are left out; other masks are refused in the call.

    - `pattern`: as in `convert`, for the layers of sounds, and of SAM for those without windows of their own, whose tokens are
      those of a map. None: they see all, as before. With `SlidingWindow`s memory is O(seq * window).

    Returns what changed by layer; `kept` are all other layers whose class is named Attention. `output_attentions` is refused, or
    gives None. Raises TypeError or ValueError where the model has no such layer, or one that computes something else than dilkit.

        >>> from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel
        >>> from dilkit.integrations.transformers import convert_relative
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, feature_projection_input_dim=16)
        >>> model = Wav2Vec2BertModel(Wav2Vec2BertConfig(**sizes, num_hidden_layers=1))
        >>> print(convert_relative(model, "SlidingWindow(9)"))
        1 attention layers
        encoder.layers.0.self_attn (Wav2Vec2BertSelfAttention): sdpa -> Pattern.of(SlidingWindow(9))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; a model of transformers is needed, such as ParakeetForCTC")
    every = {path: x for path, x in model.named_modules() if type(x).__name__.endswith("Attention")}
    layers = {path: x for path, x in every.items() if _is_relative(x)}
    if not layers:
        named = ", ".join(sorted({type(x).__name__ for x in every.values()})) or "none"
        raise ValueError(f"{type(model).__name__} has no attention with relative positions; its attention is {named}")
    unwindowed = [path for path in layers if not _is_window(model, path)]
    wanted = DENSE if pattern is None else checked(pattern)
    if isinstance(wanted, tuple) and len(wanted) != len(unwindowed):
        raise ValueError(
            f"pattern is a list of {len(wanted)}, and the model has {len(unwindowed)} such layers; give one for each"
        )
    patterns = dict(zip(unwindowed, wanted if isinstance(wanted, tuple) else [wanted] * len(unwindowed), strict=True))
    for layer in {type(x).__name__: x for x in layers.values() if not isinstance(x, _Relative)}.values():
        _check_layer(layer)
    changed = []
    for path, layer in layers.items():
        stated = getattr(getattr(layer, "config", None), "_attn_implementation", "its own")
        before = "dilkit" if isinstance(layer, _Relative) else stated
        changed.append(ConvertedLayer(path, type(layer).__name__, before, patterns.get(path, DENSE)))
        _switch(layer, patterns.get(path, DENSE))
    return Conversion(tuple(changed), tuple(path for path in every if path not in layers))


def _is_relative(layer: Any) -> bool:
    relative = getattr(layer, "position_embeddings_type", "relative") in ("relative", "relative_key")
    return type(layer).__name__ in _FORMS and relative and getattr(layer, "use_rel_pos", True)


def _is_window(model: Any, path: str) -> bool:
    return getattr(model.get_submodule(path.rpartition(".")[0]), "window_size", 0) > 0


def _switch(layer: Any, pattern: Pattern) -> None:
    layer.dilkit_pattern = pattern
    if not isinstance(layer, _Relative):
        kind: type = type(layer)
        layer.__class__ = _converted(kind)


@cache
def _converted(kind: type) -> type:
    return type(kind.__name__, (_FORMS[kind.__name__], kind), {"__module__": __name__})


class _Relative:
    """The base of layers that compute dilated attention with values of their own for each query and distance.

    It comes before a class of transformers, which has all parameters.
    """

    dilkit_pattern: Pattern
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _columns(self, seq: int) -> int:
        """Return the largest distance that a query may see."""
        branches = self.dilkit_pattern.branches
        reach = [x.reach for x in branches if isinstance(x, SlidingWindow)]
        return min([seq - 1, max(reach)] if len(reach) == len(branches) else [seq - 1])

    def _attend(
        self,
        heads: Sequence[Tensor],
        bias: RowTable,
        mask: Tensor | None,
        scaling: float,
        dropout_p: float,
        options: dict[str, Any],
    ) -> Tensor:
        """Return `(batch, seq, heads * head_dim)` of query, key and value `(batch, seq, heads, head_dim)`."""
        unknown = [name for name, x in options.items() if x is not None and x is not False and name not in _UNCHANGED]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} of {type(self).__name__} is not known to dilkit; leave it out")
        ignored = None if mask is None else ignored_keys(mask, len(heads[0]))
        rules: dict[str, Any] = dict(bias=bias, key_padding_mask=ignored, scale=scaling, dropout_p=dropout_p)
        query, key, value = heads
        out = dilated_attention(query, key, value, self.dilkit_pattern, **rules)
        assert isinstance(out, Tensor)
        return out.flatten(2)

    def _shifted(self, query: Tensor, positions: Tensor, seq: int) -> Tensor:
        """Return the products with positions `(batch or 1, 2 * seq - 1, heads, head_dim)` of distances seq - 1, ..., 1 - seq."""
        most = self._columns(seq)
        near = positions[:, seq - 1 - most : seq + most].flip(1)
        return query.transpose(1, 2) @ near.permute(0, 2, 3, 1)


def ignored_keys(mask: Tensor, batch: int) -> Tensor:
    """Return the keys that a mask of transformers hides from all queries, bool `(batch, seq)`.

    `mask`: `(batch, seq)`, nonzero = seen; or `(batch or 1, 1, queries, seq)`, bool with True = seen, or added to the scores.
    Queries that see nothing are padding. Raises ValueError for a mask that hides more.
    """
    if mask.dim() == 2:
        return mask == 0
    if mask.dim() != 4 or mask.shape[1] != 1 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        needed = "(batch, seq), or of bools or numbers that are added (batch or 1, 1, queries, seq), is needed"
        raise ValueError(f"attention_mask is {mask.dtype} {tuple(mask.shape)}; {needed}")
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    added = mask.dtype != torch.bool and not bool((hidden | (mask == 0)).all())
    keys, padding = hidden.all(2, keepdim=True), hidden.all(3, keepdim=True)
    if added or not bool((hidden == keys).logical_or(padding).all()):
        raise ValueError("attention_mask hides other keys than padding, such as chunks; say so by the pattern, without a mask")
    return keys[:, 0, 0].expand(batch, -1)


class _Parakeet(_Relative):
    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        positions = self.relative_k_proj(position_embeddings).view(len(position_embeddings), -1, *self.bias_v.shape)
        bias = RowTable(self._shifted((query + self.bias_v) * self.scaling, positions, shape[1]))
        dropout_p = self.attention_dropout if self.training else 0.0
        heads = query + self.bias_u, key, value
        return self.o_proj(self._attend(heads, bias, attention_mask, self.scaling, dropout_p, kwargs)), None


class _Conformer(_Relative):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        relative_position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:2], self.num_heads, self.head_size)
        query, key, value = (project(hidden_states).view(shape) for project in (self.linear_q, self.linear_k, self.linear_v))
        scaling = self.head_size**-0.5
        if self.position_embeddings_type == "relative":
            embeddings = relative_position_embeddings
            if embeddings is None:
                raise ValueError("relative_position_embeddings is None, but position_embeddings_type is 'relative'")
            positions = self.linear_pos(embeddings).view(*embeddings.shape[:2], *shape[2:])
            values = self._shifted((query + self.pos_bias_v) * scaling, positions, shape[1])
            query = query + self.pos_bias_u
        else:
            left, right = self.left_max_position_embeddings, self.right_max_position_embeddings
            most = min(max(left, right), self._columns(shape[1]))
            behind = torch.arange(most, -most - 1, -1, device=query.device).clamp(-left, right) + left  # j - i from most on
            values = scaling * query.transpose(1, 2) @ self.distance_embedding(behind).to(query.dtype).T
        dropout_p = self.dropout.p if self.training else 0.0
        out = self._attend((query, key, value), RowTable(values), attention_mask, scaling, dropout_p, kwargs)
        return self.linear_out(out), None


class _Map(_Relative):
    def forward(self, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple[Tensor, None]:
        batch, height, width, _ = hidden_states.shape
        heads = self.qkv(hidden_states).view(batch, height * width, 3, self.num_attention_heads, -1).unbind(2)
        query, axes = heads[0].transpose(1, 2), ((height, self.rel_pos_h), (width, self.rel_pos_w))
        values = torch.cat([query @ _resized(table, 2 * size - 1).T for size, table in axes], -1)
        dropped = self.training and not type(self).__name__.endswith("SdpaAttention")
        options = dict(output_attentions=output_attentions)
        bias = RowTable(values, (height, width))
        out = self._attend(heads, bias, None, self.scale, self.dropout if dropped else 0.0, options)
        return self.proj(out.view(batch, height, width, -1)), None


def _resized(table: Tensor, size: int) -> Tensor:
    """Return a table of so many rows: `table`, or interpolated between its own, as for maps of another size."""
    return table if len(table) == size else F.interpolate(table.T[None], size=size, mode="linear")[0].T


_MAPS = "Sam", "SamHQ", "GotOcr2", "SLANeXt", "PPFormulaNet", "DeepseekOcr2Sam", "UnlimitedOcrSam"
_FORMS: dict[str, type[_Relative]] = {
    "ParakeetEncoderAttention": _Parakeet,
    **dict.fromkeys((f"{name}SelfAttention" for name in ("Wav2Vec2Bert", "Wav2Vec2Conformer")), _Conformer),
    **dict.fromkeys((f"SeamlessM4T{version}ConformerSelfAttention" for version in ("", "v2")), _Conformer),
    **dict.fromkeys((f"{name}Vision{kind}Attention" for name in _MAPS for kind in ("", "Sdpa")), _Map),
}


def _check_layer(layer: Any) -> None:
    """Raise ValueError where a layer computes something else by dilkit, on a few rows, than by its original forward."""
    original = copy.deepcopy(layer).to("cpu", torch.float64).eval()
    if hasattr(original, "config"):
        original.config._attn_implementation = "eager"
    draw, seq, form = torch.Generator().manual_seed(0), 7, _FORMS[type(layer).__name__]
    for x in original.parameters():  # some begin as zeros
        x.data.normal_(0.0, 0.2, generator=draw)
    converted = copy.deepcopy(original)
    _switch(converted, DENSE)
    arguments: dict[str, Any] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    if form is _Map:
        x, seen = normal(1, 3, 4, original.proj.in_features), torch.ones(1, 3, dtype=torch.bool)
    else:
        width = (original.q_proj if form is _Parakeet else original.linear_q).in_features
        x, seen = normal(2, seq, width), torch.arange(seq) < torch.tensor([[5], [7]])
        mask = seen[:, None, None].expand(2, 1, seq, seq)
        hidden = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        name = "position_embeddings" if form is _Parakeet else "relative_position_embeddings"
        arguments["attention_mask"] = mask if form is _Parakeet else hidden
        arguments |= (
            {} if getattr(original, "position_embeddings_type", "") == "relative_key" else {name: normal(1, 2 * seq - 1, width)}
        )
        arguments |= {name: arguments[name].expand(2, -1, -1)} if form is _Parakeet else {}
    with torch.no_grad():
        expected, result = (layer(x, **arguments)[0][seen] for layer in (original, converted))
    if not torch.allclose(result, expected, rtol=0.0, atol=_AGREES * float(expected.abs().max())):
        off = float((result - expected).abs().max())
        raise ValueError(f"{type(layer).__name__} of this version differs from dilkit by {off:.1e} on a few rows")
