"""`HeadParallel`: the heads of attention over the ranks of a mesh, as a style of torch's tensor parallelism."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.weak import WeakTensorKeyDictionary

from dilkit.checks import LONGEST, not_distributed
from dilkit.compiler import not_compiled
from dilkit.nn.attention import BiasedModule
from dilkit.nn.checks import check_plain
from dilkit.nn.multihead import APART, PACKED, MultiheadDilatedAttention
from dilkit.nn.rank_heads import NormOverRanks, RankHeads
from dilkit.pattern import BlockSparse, Pattern


class HeadParallel(ParallelStyle):
    """A style of `torch.distributed.tensor.parallel`: of n ranks, rank r computes the heads `r * H / n .. (r + 1) * H / n - 1`.

        parallelize_module(model, mesh["tp"], {"attention": HeadParallel()})

    H is the number of key/value heads of the model, a multiple of n; query heads go with theirs. Heads see what they see on one
    rank: the rank's pattern says which they are (`head_shard` of `dilkit.Pattern`). Results and gradients are those of one rank
    within rounding. The module is one of two:

    - `MultiheadDilatedAttention`: queries, keys, values and sinks are cut by heads, as `ColwiseParallel` cuts, `out_proj` as
      `RowwiseParallel` does. Inputs are the same on all ranks, or DTensors, and so is the output, a local tensor. Parameters are
      DTensors: `full_tensor()` of each is that of one rank. The packed `in_proj_weight` becomes `q_proj_weight`, `k_proj_weight`
      and `v_proj_weight`; state dicts load in either layout. `in_proj_bias` is whole on each rank, and so are the weights of a
      bias of the scores. A `layer_norm` is over the heads of all ranks, for which two numbers travel for each row.
    - A module that holds a `pattern` and is called with query and key `(..., seq, heads of the rank, head_dim)` first, such as
      `DilatedAttention` and `dilkit.comm.RingDilatedAttention`: all ranks have as many heads, as behind a `ColwiseParallel`
      projection. `pattern` becomes the rank's when the module is called, unless it is the same for all heads and no weights are
      dropped, and no bias or several orders used, which go by the number of a head.

    Dropped weights are those of one rank if torch's generator of the CPU is in the same state on all ranks. Give `DilatedCache`
    the rank's pattern, `layer.attention.pattern`, and its `num_kv_heads / n` heads.

    Raises TypeError for another module, ValueError for a mesh of several dimensions, for heads that the number of ranks does not
    divide, and for a pattern that has a `head_shard` already.

    Example, on a mesh of a single rank; docs/ranks.md has one of two:

        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern
        >>> from dilkit.nn import HeadParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = MultiheadDilatedAttention(32, 4, DilatedAttention(Pattern([16, 64], [1, 4])))
        >>> x = torch.randn(2, 64, 32)  # (batch, seq, embed_dim)
        >>> alone, _ = layer(x)
        >>> layer = parallelize_module(layer, init_device_mesh("cpu", (1,)), HeadParallel())
        >>> torch.allclose(layer(x)[0], alone, atol=1e-6), layer.attention.pattern.head_shard
        (True, (0, 4))
        >>> dist.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            shape = f"{device_mesh.ndim} dimensions, of shape {tuple(device_mesh.shape)}"
            raise ValueError(f'device_mesh has {shape}; heads go over one: give it by its name, as device_mesh["tp"]')
        if isinstance(module, MultiheadDilatedAttention):
            # torch 2.6 has no choice of the rank whose values all take
            source = dict(src_data_rank=self.src_data_rank) if hasattr(ParallelStyle, "src_data_rank") else {}
            _divide(module, device_mesh, source)
        else:
            _follow_calls(module, device_mesh)
        return module


def _divide(layer: MultiheadDilatedAttention, mesh: DeviceMesh, source: dict[str, Any]) -> None:
    ranks, before = RankHeads(mesh), layer._rank_heads
    if before == ranks:
        return
    if before is not None:
        raise ValueError(f"module has its heads over {before.mesh} already; they cannot go over {mesh} too")
    if layer.num_kv_heads % mesh.size():
        sizes = f"num_kv_heads={layer.num_kv_heads} of {layer.num_heads} heads"
        raise ValueError(f"{sizes} cannot be divided by the {mesh.size()} ranks of the mesh; use a divisor of it")
    _check_own(layer)
    inner = _inner_of_rank(layer, ranks, source)
    parallelize_module(layer.out_proj, mesh, RowwiseParallel(), **source)
    layer.attention, layer._rank_heads = inner, ranks
    _take_apart(layer)
    for name in (*APART, "sinks"):
        _distribute(layer, name, mesh, Shard(0), source)
    _distribute(layer, "in_proj_bias", mesh, Replicate(), source)
    if layer.inner_norm is not None:
        layer.inner_norm = NormOverRanks(layer.inner_norm, ranks)
        for name in ("weight", "bias"):
            _distribute(layer.inner_norm, name, mesh, Shard(0), source)


def _take_apart(layer: MultiheadDilatedAttention) -> None:
    packed = layer.in_proj_weight
    if packed is None:
        return
    derived = _derived_from(packed)
    for name, weight in zip(APART, packed.detach().tensor_split(layer._cuts), strict=True):
        if name not in derived:  # Copies: views would keep the packed weight in memory.
            derived[name] = nn.Parameter(weight.clone(), requires_grad=packed.requires_grad)
        setattr(layer, name, derived[name])
    setattr(layer, PACKED, None)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: dict[str, Any]) -> None:
    parameter: nn.Parameter | None = getattr(module, name)
    if parameter is not None:
        derived, where = _derived_from(parameter), (mesh, placement)
        if where not in derived:
            whole = distribute_tensor(parameter.detach(), mesh, [placement], **source)
            derived[where] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        setattr(module, name, derived[where])


_DERIVED: MutableMapping[Tensor, dict[Any, nn.Parameter]] = WeakTensorKeyDictionary()


def _derived_from(parameter: nn.Parameter) -> dict[Any, nn.Parameter]:
    """Return the parameters made from one: layers that share it, as T5's share their bias, share those as well."""
    return _DERIVED.setdefault(parameter, {})


def _check_own(layer: MultiheadDilatedAttention) -> None:
    """Raise ValueError for weights that are computed, as by a parametrization, and for parts with hooks."""
    first = "divide the layer first, and change it then"
    check_plain("out_proj", layer.out_proj, nn.Linear, first)
    if layer.inner_norm is not None:
        check_plain("inner_norm", layer.inner_norm, nn.LayerNorm, first)
    for name in (PACKED, *APART, "in_proj_bias", "sinks"):
        if name not in layer._parameters:
            raise ValueError(f"{name} is no parameter of the layer, as if it were parametrized; {first}")


def _inner_of_rank(layer: MultiheadDilatedAttention, ranks: RankHeads, source: dict[str, Any]) -> nn.Module:
    """Copy the inner attention with the pattern of the rank's heads; weights of a bias that is learned are whole on each rank."""
    pattern, mesh = _pattern_of_model(layer.attention), ranks.mesh
    heads, kv_heads = layer.num_heads // mesh.size(), layer.num_kv_heads // mesh.size()
    part = _pattern_of_rank(pattern, mesh.get_local_rank(), mesh.size(), heads, kv_heads)
    inner: Any = copy.copy(layer.attention)
    inner.pattern, inner._parameters = part, dict(inner._parameters)
    if isinstance(inner, BiasedModule):
        inner._rank_heads = ranks
        if isinstance(inner.bias_weights, nn.Parameter):
            _distribute(inner, "bias_weights", mesh, Replicate(), source)
    return inner  # type: ignore[no-any-return]


def _pattern_of_model(module: nn.Module) -> Pattern:
    pattern = getattr(module, "pattern", None)
    if not isinstance(pattern, Pattern):
        needed = "MultiheadDilatedAttention, DilatedAttention or RingDilatedAttention is needed"
        raise TypeError(f"{type(module).__name__}, given HeadParallel, holds no dilkit.Pattern as its `pattern`; a {needed}")
    if pattern.head_shard is not None:
        held = f"head_shard={pattern.head_shard}, heads of a rank already"
        raise ValueError(f"pattern={pattern} of {type(module).__name__} has {held}; give that of all heads, without head_shard")
    return pattern


def _pattern_of_rank(pattern: Pattern, rank: int, size: int, heads: int, kv_heads: int) -> Pattern:
    pattern.check_heads(heads * size, kv_heads * size)
    first = rank * kv_heads
    part = pattern.of_kv_heads(first, first + kv_heads, heads * size, kv_heads * size)
    if part is None:  # no branch serves them: they see nothing, as on one rank
        return pattern.with_branches(BlockSparse([[False]], LONGEST), head_shard=(first, kv_heads * size))
    return part


@dataclass(frozen=True)
class _BeforeCall:
    """A hook before each call of a module, which gives it the pattern of the heads that it is called with."""

    pattern: Pattern
    rank: int
    size: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(("query", "key"), args, strict=False)), **kwargs}
        query, key = arguments.get("query"), arguments.get("key")
        if not isinstance(query, Tensor) or not isinstance(key, Tensor) or min(query.dim(), key.dim()) < 3:
            return  # the module says what it needs
        not_distributed("query", query)
        not_distributed("key", key)
        by_number = bool(arguments.get("dropout_p")) or arguments.get("bias") is not None
        call = (query.shape[-2], key.shape[-2], by_number)
        if getattr(module, "_placed_for", None) != call:
            self.place(module, call)

    @not_compiled  # what it makes is no constant of a graph; calls with as many heads later on find it made
    def place(self, module: Any, call: tuple[int, int, bool]) -> None:
        """Give `module` the pattern for calls with so many query and key/value heads, where their numbers matter or not."""
        heads, kv_heads, by_number = call
        pattern = self.pattern
        biased = getattr(module, "bias", None) is not None  # of the heads of the model, which the pattern then says
        if by_number or biased or pattern.differs_by_head or len(getattr(module, "orders", None) or ()) > 1:
            pattern = _pattern_of_rank(pattern, self.rank, self.size, heads, kv_heads)
        module.pattern, module._placed_for = pattern, call


def _follow_calls(module: nn.Module, mesh: DeviceMesh) -> None:
    rank, size = mesh.get_local_rank(), mesh.size()
    for other in module._forward_pre_hooks.values():
        if isinstance(other, _BeforeCall):
            if (other.rank, other.size) == (rank, size):
                return
            raise ValueError(
                f"module has its heads over {other.size} ranks already; they cannot go over the {size} of {mesh} too"
            )
    if isinstance(module, BiasedModule) and module.bias_weights is not None and module.bias_weights.requires_grad:
        way = "give it to a MultiheadDilatedAttention and this style to that, or use a buffer"
        raise ValueError(f"{type(module).__name__} has a bias that is learned, with gradients of a rank's heads alone; {way}")
    module.register_forward_pre_hook(_BeforeCall(_pattern_of_model(module), rank, size), with_kwargs=True)
