"""torchtitan's inner attention by dilated attention: packed tokens `(tokens, heads, head_dim)`, over ranks by rows and by heads.

parallelize_module(block.attention, mesh["cp"], {"inner_attention": ContextParallelStyle()})      plain tensors, rows of a rank
DTensors with Shard(0), Shard(1)                                                                  rows and heads, by placement
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from dilkit.attention import dilated_attention
from dilkit.checks import check_type
from dilkit.integrations.ranks import nothing_seen, over_ranks
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern

ROWS, HEADS = 0, 1


class InnerAttention(nn.Module):
    """The `inner_attention` of torchtitan's attention: `inner_attention(q, k, v, attention_masks=, scale=)`.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        of each packed sequence by itself

    `q` `(tokens, heads, head_dim)`, `k` and `v` with `kv_heads` heads; `attention_masks`: None, where all tokens are of one
    sequence, or what has `cu_seq_q` int32 `(sequences + 1,)`, as torchtitan's `VarlenMetadata` does: where the packed sequences
    of all ranks together begin. Tensors are plain, or DTensors that are sharded by rows, `Shard(0)`, or by heads, `Shard(1)`,
    along the dimensions of their mesh: the result is one too.

    Raises TypeError or ValueError for arguments that do not fit, for a `score_mod` or `block_mask`, for other placements, and for
    heads that are not shared out evenly.

        >>> import torch
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.torchtitan import InnerAttention
        >>> inner, q, kv = InnerAttention(Pattern([16, 64], [1, 4])), torch.randn(50, 4, 8), torch.randn(50, 2, 8)
        >>> inner(q, kv, kv).shape
        torch.Size([50, 4, 8])
    """

    def __init__(self, pattern: Pattern, *, is_causal: bool = True) -> None:
        super().__init__()
        check_type("pattern", pattern, Pattern, "a dilkit.Pattern is needed")
        self.pattern, self.is_causal = pattern, is_causal
        self.comm: Any = None
        self._comms: dict[Any, Any] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any = None, scale: float | None = None, **options: Any
    ) -> Tensor:
        """Return `out` like `q`. `options`: `enable_gqa` is taken, whatever it is; others have to be None or False."""
        if asked := [
            name for name, value in options.items() if name != "enable_gqa" and value is not None and value is not False
        ]:
            raise ValueError(f"{', '.join(asked)}: the pattern defines which keys a query sees; leave it out")
        if q.dim() != 3:
            raise ValueError(f"q has shape {tuple(q.shape)}; (tokens, heads, head_dim) is needed")
        if attention_masks is not None and not hasattr(attention_masks, "cu_seq_q"):
            raise TypeError(
                f"attention_masks is a {type(attention_masks).__name__}; what has cu_seq_q, as VarlenMetadata, is needed"
            )
        cu_seqlens = None if attention_masks is None else attention_masks.cu_seq_q.int()
        if not hasattr(q, "device_mesh"):
            return self._attend(q, k, v, self.pattern, self.comm, cu_seqlens, scale)
        if any(getattr(x, "placements", None) != q.placements for x in (k, v)):  # type: ignore[attr-defined]
            raise ValueError("q, k and v have other placements; DTensors that are sharded alike are needed")
        pattern, comm = self._placed(q, k)
        mine: tuple[Tensor, Tensor, Tensor] = tuple(x.to_local() for x in (q, k, v))  # type: ignore[attr-defined]
        local = nothing_seen(*mine) if pattern is None else self._attend(*mine, pattern, comm, cu_seqlens, scale)
        like: Any = q
        return like.from_local(local, like.device_mesh, like.placements, run_check=False, shape=q.shape, stride=q.stride())  # type: ignore[no-any-return]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, comm: Any, cu_seqlens: Tensor | None, scale: float | None
    ) -> Tensor:
        call: dict[str, Any] = dict(is_causal=self.is_causal, scale=scale)
        out: Any
        if cu_seqlens is None:
            rows = q[None], k[None], v[None], pattern
            out = dilated_attention(*rows, **call) if comm is None else over_ranks().attend(*rows, comm, **call)
            out = out.squeeze(0)
        elif comm is None:
            out = dilated_attention_varlen(q, k, v, pattern, cu_seqlens, **call)
        else:
            out = over_ranks().attend_packed(q, k, v, pattern, comm, cu_seqlens, **call)
        return out  # type: ignore[no-any-return]

    def _placed(self, q: Any, k: Any) -> tuple[Pattern | None, Any]:
        pattern: Pattern | None = self.pattern
        comm, mesh = self.comm, q.device_mesh
        for dim, placement in enumerate(q.placements):
            if placement.is_shard(ROWS):
                if comm is not None:
                    raise ValueError(f"q has placements {q.placements}, rows cut along two dimensions of {mesh}; cut one")
                comm = self._comm(mesh, dim)
            elif placement.is_shard(HEADS):
                if sum(one.is_shard(HEADS) for one in q.placements) > 1:
                    raise ValueError(f"q has placements {q.placements}, heads cut along two dimensions of {mesh}; cut one")
                pattern = _of_heads(self.pattern, q.shape[HEADS], k.shape[HEADS], mesh.get_local_rank(dim), mesh.size(dim))
            elif not placement.is_replicate():
                raise ValueError(
                    f"q has placement {placement} along dimension {dim} of {mesh}; Shard(0), Shard(1) or Replicate() are needed"
                )
        return pattern, comm

    def _comm(self, mesh: Any, dim: int) -> Any:
        if (mesh, dim) not in self._comms:
            self._comms[mesh, dim] = over_ranks().transport(mesh[mesh.mesh_dim_names[dim]] if mesh.ndim > 1 else mesh)
        return self._comms[mesh, dim]


class ContextParallelStyle(ParallelStyle):
    """A style of `torch.distributed.tensor.parallel.parallelize_module`: `InnerAttention` on rows that are cut over a mesh.

    Rank t of the mesh, of one dimension, holds the rows that follow those of rank t - 1; `attention_masks` says where the packed
    sequences of all ranks together begin. Raises TypeError for another module, and what `dilkit.comm.TorchComm` raises.

        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.torchtitan import ContextParallelStyle, InnerAttention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> inner = parallelize_module(InnerAttention(Pattern([8], [2])), init_device_mesh("cpu", (1,)), ContextParallelStyle())
        >>> inner.comm.size
        1
        >>> dist.destroy_process_group()
    """

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, InnerAttention):
            raise TypeError(f"module is a {type(module).__name__}; a dilkit.integrations.torchtitan.InnerAttention is needed")
        module.comm = over_ranks().transport(device_mesh)
        return module


def _of_heads(pattern: Pattern, heads: int, kv_heads: int, rank: int, ranks: int) -> Pattern | None:
    if kv_heads % ranks or heads % ranks:
        raise ValueError(
            f"{heads} heads and {kv_heads} key/value heads over {ranks} ranks; a number of ranks that divides both is needed"
        )
    if not pattern.differs_by_head:
        return pattern
    held = kv_heads // ranks
    return pattern.of_kv_heads(rank * held, (rank + 1) * held, heads, kv_heads)
