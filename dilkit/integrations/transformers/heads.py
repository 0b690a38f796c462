"""The heads of a model that a layer holds where ranks share them out: in tensor parallelism, or sequence parallelism by heads.

all heads                              the pattern as it is
a part, and Pattern(head_shard=)       what it says
        and register(mesh=)            equal parts, in the order of the mesh's ranks
        and projections over ranks     where torch's DTensor of a projection begins
        and none of these              refused, if heads differ
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.compiler import assume_constant_result
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class HeldHeads:
    """`heads` query and `kv_heads` key/value heads, of `total` and `kv_total` in the model; None where that is not known."""

    heads: int
    kv_heads: int
    total: int | None
    kv_total: int | None

    @property
    def are_a_part(self) -> bool:
        return _fewer(self.heads, self.total) or _fewer(self.kv_heads, self.kv_total)


def check_mesh(mesh: Any) -> None:
    if mesh is None:
        return
    if not hasattr(mesh, "get_local_rank") and not (hasattr(mesh, "rank") and hasattr(mesh, "size")):
        raise TypeError(
            f"mesh={mesh!r} is a {type(mesh).__name__}; a DeviceMesh of one dimension, such as mesh['tp'], or a process group is "
            "needed"
        )
    if getattr(mesh, "ndim", 1) != 1:
        raise ValueError(f"mesh={mesh} has {mesh.ndim} dimensions; name the one over which heads are divided, such as mesh['tp']")


def held_heads(module: Any, heads: int, kv_heads: int) -> HeldHeads:
    config = module.config
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[module.layer_idx]
    total = _count(config, "num_attention_heads")
    return HeldHeads(heads, kv_heads, total, _count(config, "num_key_value_heads") or total)


def on_held_heads(pattern: Pattern, module: Any, held: HeldHeads, mesh: Any) -> Pattern | None:
    """Restrict `pattern` to the held heads; None if no branch serves them. Raises ValueError if nothing says which they are."""
    if not pattern.differs_by_head:
        return pattern
    if pattern.head_shard is not None:
        _check_total(pattern, held)
        return pattern
    if not held.are_a_part:
        return pattern
    first = _first(module, held, mesh)
    if first is None:
        raise ValueError(
            f"{_part_of_heads(module, held)}, and pattern={pattern} differs by head, but it is unknown which heads these "
            "are. Pass register(..., mesh=) or Pattern(..., head_shard=(first, total)) of key/value heads, or a pattern that is "
            "the same for all heads"
        )
    assert held.total is not None
    assert held.kv_total is not None
    which = first, first + held.kv_heads, held.total, held.kv_total
    if torch.compiler.is_compiling():
        return _PARTS[_known_part(pattern.to_json(), *which)]
    return _part(pattern, *which)


def sinks_of(sinks: Tensor | None, module: Any, pattern: Pattern, held: HeldHeads, mesh: Any) -> Tensor | None:
    """Return the sinks `(heads,)` of the held heads, from those of all heads or of these; `pattern` as of `on_held_heads`."""
    if sinks is None or sinks.shape != (held.total,) or not held.are_a_part:
        return sinks
    first = _first(module, held, mesh) if pattern.head_shard is None else pattern.head_shard[0]
    if first is None:
        raise ValueError(
            f"{_part_of_heads(module, held)}, and its sinks, s_aux, are those of all heads, but it is unknown which are its own. "
            "Pass register(..., mesh=)"
        )
    group = held.heads // held.kv_heads
    return sinks[first * group : first * group + held.heads]


def _first(module: Any, held: HeldHeads, mesh: Any) -> int | None:
    if held.total is None or held.kv_total is None or held.heads * held.kv_total != held.kv_heads * held.total:
        return None  # unequal parts of the query heads and of the key/value heads
    if mesh is None:
        return _by_projections(module, held)
    size: int = mesh.size()
    rank: int = mesh.get_local_rank() if hasattr(mesh, "get_local_rank") else mesh.rank()
    if held.kv_heads * size != held.kv_total:
        raise ValueError(
            f"{_part_of_heads(module, held)}, and mesh={mesh} has {size} ranks: each holds as many of the {held.kv_total} "
            f"key/value heads, {held.kv_total} / {size}; give the mesh over which the heads are divided"
        )
    return rank * held.kv_heads


def _by_projections(module: Any, held: HeldHeads) -> int | None:
    """Return the first held head by the layer's weights, if they are DTensors whose rows are split as the key/value heads are."""
    if not isinstance(module, nn.Module) or held.kv_total is None:
        return None
    # A projection that `fully_shard` wraps by itself has DTensors too, cut as they are stored, and not by heads.
    parts = [part for part in module.modules() if part is module or not hasattr(part, "set_requires_gradient_sync")]
    weights = [x for part in parts for x in part.parameters(recurse=False) if hasattr(x, "device_mesh")]
    begins = {_first_head(weight, held.kv_heads, held.kv_total) for weight in weights}
    begins.discard(None)
    return begins.pop() if len(begins) == 1 else None


def _first_head(weight: Any, kv_heads: int, kv_total: int) -> int | None:
    """Return the first key/value head in a DTensor `(rows, columns)`; None unless its rows are split as these heads are."""
    splits = [dim for dim, placement in enumerate(weight.placements) if placement.is_shard(0)]
    if len(splits) != 1 or weight.ndim != 2 or weight.shape[0] % kv_total:
        return None
    (dim,), rows = splits, weight.shape[0]
    chunk = -(-rows // weight.device_mesh.size(dim))
    first = min(weight.device_mesh.get_local_rank(dim) * chunk, rows)
    held = min(chunk, rows - first)
    return first * kv_total // rows if held * kv_total == kv_heads * rows else None


def _check_total(pattern: Pattern, held: HeldHeads) -> None:
    assert pattern.head_shard is not None
    if held.kv_total is not None and pattern.head_shard[1] not in (held.kv_total, held.total):  # some models repeat them
        raise ValueError(
            f"pattern={pattern} is for {pattern.head_shard[1]} key/value heads in all, and the model has {held.kv_total}; give "
            f"head_shard=(first, {held.kv_total})"
        )


def _part_of_heads(module: Any, held: HeldHeads) -> str:
    which, part, total = ("", held.heads, held.total)
    if not _fewer(part, total):
        which, part, total = "key/value ", held.kv_heads, held.kv_total
    return f"{type(module).__name__} has {part} of the {total} {which}heads of the model, as under tensor parallelism"


_PARTS: dict[str, Pattern | None] = {}


@assume_constant_result
def _known_part(text: str, *which: int) -> str:
    """Return the key under which `_PARTS` has the part. torch.compile can keep a text, but not a pattern, and can make none."""
    key = f"{text} {which}"
    if key not in _PARTS:
        _PARTS[key] = _part(Pattern.from_json(text), *which)
    return key


@lru_cache(256)
def _part(pattern: Pattern, *which: int) -> Pattern | None:
    return pattern.of_kv_heads(*which)


def _count(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def _fewer(part: int, total: int | None) -> bool:
    return total is not None and part < total
