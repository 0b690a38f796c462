"""One call of torchscale's `DilatedAttention.forward`, computed by dilkit.

Its projections, `inner_attn_ln`, `xpos` and parameters are the module's own; only what lies between them is replaced.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.compiler import assume_constant_result
from dilkit.device import capturing
from dilkit.integrations.ranks import over_ranks
from dilkit.pattern import Pattern


class MaskMemory:
    """Looks at each mask once, not once in each layer.

    torchscale's encoder makes a mask for every call, all False unless it was given one, and hands it to each of its layers. A
    call with a mask is slower than one without, but looking at a mask on a GPU waits for the GPU. So a mask outside the CPU is
    looked at in the first layer, and again only after torch has written to it.
    """

    def __init__(self) -> None:
        self._last: tuple[Callable[[], Tensor | None], int, bool] = (lambda: None, 0, True)

    def hides(self, mask: Tensor) -> bool:
        """True if `mask`, bool, has a True, or if that cannot be found out or remembered."""
        if torch.compiler.is_compiling():
            return True
        if mask.device.type == "cpu":
            return _look(mask)
        if mask.is_inference() or capturing(mask.device):
            return True
        last, version, answer = self._last
        if last() is not mask or version != mask._version:
            answer = _look(mask)
            self._last = ref(mask), mask._version, answer
        return answer


def _look(mask: Tensor) -> bool:
    """True if the mask hides anything. Warns if it hides a whole sequence, as an inverted mask does."""
    hides = bool(mask.any())
    if hides and int(mask.sum(dim=-1).max()) == mask.shape[-1]:
        warnings.warn(
            "key_padding_mask hides every key of a sequence, whose rows see nothing; it is True where there is padding, "
            "~mask if yours says where tokens are",
            stacklevel=2,
        )
    return hides


@dataclass(frozen=True)
class Choices:
    """The choices of an `install`, its arguments, and the memory of its calls."""

    tail: str
    mask: str
    backend: str | Sequence[str] | None
    masks: MaskMemory = field(default_factory=MaskMemory, compare=False)
    warned: set[tuple[int, int]] = field(default_factory=set, compare=False)


def pattern_of(module: Any, tail: str) -> Pattern:
    """Return the pattern of torchscale's module: its lengths and ratios in pairs; what has no partner is left out."""
    for name in ("segment_length", "dilated_ratio"):
        if isinstance(values := getattr(module.args, name, None), str) or not values:
            raise ValueError(f"args.{name}={values!r} of {type(module).__name__} is no list; a list of integers is needed")
    pairs = tuple(zip(module.args.segment_length, module.args.dilated_ratio, strict=False))
    return _patterns[_name_of_pattern(pairs, tail)]


PROCEDURE = ("attention_ops", "gathering", "gather_kv", "scattering", "dense_to_sparse", "sparse_to_dense")
"""The methods of torchscale's class that its `forward` calls, and dilkit does not."""


def check_procedure(kind: type, own: type) -> None:
    """Raise TypeError for a subclass of the patched class that computes a part of it in its own way."""
    if changed := [name for name in PROCEDURE if getattr(own, name, None) is not getattr(kind, name, None)]:
        raise TypeError(
            f"{own.__name__} has its own {', '.join(changed)}, which dilkit does not call; give it its own forward, which "
            "install() leaves alone"
        )


_patterns: dict[str, Pattern] = {}


@assume_constant_result
def _name_of_pattern(pairs: tuple[tuple[int, int], ...], tail: str) -> str:
    """Return the name in `_patterns` of the pattern, which is made unless it is there."""
    name = f"{tail} {pairs}"
    if name not in _patterns:
        lengths, ratios = zip(*pairs, strict=True)
        _patterns[name] = Pattern(lengths, ratios, offset="block", tail=tail)
    return name


def attend(
    options: Choices,
    package: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    incremental_state: dict[str, Tensor] | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rel_pos: Tensor | None = None,
    is_first_step: bool = False,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """Compute `forward` of `module`, of a class in `package`, whose `utils` know the process groups.

    `incremental_state` holds the keys and values of earlier rows; at `is_first_step` there are none.
    """
    _check_supported(module, attn_mask, rel_pos)
    if is_first_step and incremental_state:
        held = {name: tuple(rows.shape) for name, rows in incremental_state.items()}
        raise ValueError(f"is_first_step is given with an incremental_state that holds {held}; give a new one, or leave it out")
    q, k, v = (_heads(module, x) for x in (module.q_proj(query), module.k_proj(key), module.v_proj(value)))
    if incremental_state is not None:
        k, v = (_appended(incremental_state, name, x) for name, x in (("prev_key", k), ("prev_value", v)))
    before = k.shape[1] - q.shape[1]
    if k.shape[1] != v.shape[1] or (before and incremental_state is None):
        raise ValueError(
            f"query has {q.shape[1]} rows, key {k.shape[1]} and value {v.shape[1]}; dilated attention is within one sequence"
        )
    if module.xpos is not None:
        q, k = _rotated(module, q, before, False).type_as(v), _rotated(module, k, 0, True).type_as(v)
    q = F.pad(q, (0, 0, 0, 0, before, 0)) if before else q  # rows that were decoded before; their results are not needed again
    group = _group(module, package)
    refused = dict(incremental_state=incremental_state, xPos=module.xpos)  # xPos would count from each rank's first row
    if group is not None and (given := [name for name, value in refused.items() if value is not None]):
        raise ValueError(f"{' and '.join(given)} is given with seq_parallel: run it on one rank, without seq_parallel")
    mask = None if key_padding_mask is None else key_padding_mask.to(torch.bool)
    out = _attention(options, pattern_of(module, options.tail), (q, k, v), mask, is_causal, group)
    out = out[:, before:].reshape(query.shape)
    return module.out_proj(out if module.inner_attn_ln is None else module.inner_attn_ln(out)), None


def _check_supported(module: Any, attn_mask: Tensor | None, rel_pos: Tensor | None) -> None:
    if attn_mask is not None:
        raise ValueError("attn_mask is given, but what sees what is for the segments to say: leave attn_mask out")
    if rel_pos is not None:
        raise ValueError(
            f"rel_pos is given, a tensor {tuple(rel_pos.shape)} of all pairs, which torchscale's DilatedAttention does not take "
            "either: make the model with args.rel_pos_buckets=0. dilkit.MultiheadDilatedAttention has such tables: call it with "
            "score_bias=dilkit.RelativeTable(table, dilkit.t5_buckets())"
        )
    if module.training and module.dropout > 0:
        raise ValueError(
            f"attention dropout is {module.dropout}: torchscale drops weights of each branch by itself, dilkit those of the one "
            "softmax; set attention_dropout=0, or call eval()"
        )


def _heads(module: Any, x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], module.num_heads, module.head_dim)


def _appended(state: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
    """Append the rows `new` to `state[name]`, `(batch, heads, rows, head_dim)` as torchscale keeps them, and return all."""
    rows = new.transpose(1, 2)
    if name in state:
        batch, heads, _, head_dim = rows.shape
        held = tuple(state[name].shape)
        if held != (batch, heads, held[2] if len(held) == 4 else -1, head_dim):
            needed = f"(batch, heads, rows, head_dim) = ({batch}, {heads}, rows, {head_dim})"
            raise ValueError(f"incremental_state[{name!r}] has shape {held}; {needed} is needed: is it of other sequences?")
        rows = torch.cat([state[name], rows], dim=2)
    state[name] = rows.contiguous()
    return state[name].transpose(1, 2)


def _rotated(module: Any, x: Tensor, offset: int, downscale: bool) -> Tensor:
    """Rotate `x` by the module's xPos, which takes one head at a time."""
    rows = x.transpose(1, 2)
    turned: Tensor = module.xpos(rows.flatten(0, 1), offset=offset, downscale=downscale)
    return turned.view(rows.shape).transpose(1, 2)


def _attention(
    options: Choices,
    pattern: Pattern,
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    group: Any,
) -> Tensor:
    mask = None if options.mask == "ignore" else mask
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    _warn_of_difference(options, pattern, rows[0].shape[1] * ranks)
    call: dict[str, Any] = dict(is_causal=is_causal, backend=options.backend)
    out: Tensor
    if group is not None:
        out = over_ranks().attend(*rows, pattern, _transport(group), key_padding_mask=mask, **call)
    else:
        fits = mask is not None and mask.shape == rows[1].shape[:2]  # what does not is refused there
        mask = mask if mask is None or not fits or options.masks.hides(mask) else None
        out = dilated_attention(*rows, pattern, key_padding_mask=mask, **call)  # type: ignore[assignment]
    return out


def _group(module: Any, package: str) -> Any:
    """Return the process group over which `module` shards its sequences, as its own package makes it; None if it does not."""
    if not getattr(module.args, "seq_parallel", False):
        return None
    group = sys.modules[f"{package}.utils"].get_data_parallel_group()
    return None if group is None or torch.distributed.get_world_size(group) == 1 else group


@lru_cache(maxsize=8)
def _transport(group: Any) -> Any:
    return over_ranks().transport(group)


def _warn_of_difference(options: Choices, pattern: Pattern, seq: int) -> None:
    """Warn, once a branch, if torchscale's own results are not dilated attention, and so differ from dilkit's."""
    for branch in pattern.segments:
        w, r = sizes = branch.segment_length, branch.dilation_rate
        if w % r and seq > w and sizes not in options.warned:
            options.warned.add(sizes)
            warnings.warn(
                f"segment_length={w} is no multiple of dilated_ratio={r}: torchscale itself puts the results of this branch into "
                f"wrong rows from row {w} on, while dilkit computes dilated attention, so results differ from torchscale's",
                stacklevel=4,
            )
