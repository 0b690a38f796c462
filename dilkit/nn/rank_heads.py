"""The part of a tensor-parallel layer that one rank computes: its heads, its slices of parameters, norms over all heads.

Parameters are DTensors, used as local tensors. Inputs are the same on all ranks, and their gradient is the sum over ranks.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


@dataclass(frozen=True)
class RankHeads:
    """The heads of a rank of `mesh`: as many as each other rank has, in the order of the ranks."""

    mesh: DeviceMesh

    def __deepcopy__(self, memo: object) -> RankHeads:
        return self  # a process group is not copied

    def rows(self, *inputs: Tensor) -> list[Tensor]:
        """Return `inputs` as local tensors whose gradients are summed over ranks; equal inputs share one tensor."""
        local: list[Tensor] = []
        for i, x in enumerate(inputs):
            first = next(j for j, other in enumerate(inputs) if other is x)
            local.append(self._of_all(x) if first == i else local[first])
        return local

    def part(self, parameter: Tensor) -> Tensor:
        return cast(DTensor, parameter).to_local()

    def parts_of_bias(self, bias: Tensor, cuts: tuple[int, int]) -> list[Tensor]:
        """Return this rank's slices of the query, key and value biases. Every rank holds the packed `bias` whole."""
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        return [one.chunk(size)[rank] for one in self._of_all(bias).tensor_split(cuts)]

    def part_of_all(self, weights: Tensor) -> Tensor:
        """Return the rank's part, in the first dimension, of weights that all ranks hold; gradients are summed over ranks."""
        return self._of_all(weights).chunk(self.mesh.size())[self.mesh.get_local_rank()]

    def every(self, x: Tensor) -> Tensor:
        """Gather `x` `(..., n)` of all ranks, one after the other: `(..., ranks * n)`."""
        return self._of_all(DTensor.from_local(x, self.mesh, [Shard(x.dim() - 1)], run_check=False))

    def _of_all(self, x: Tensor) -> Tensor:
        """Return `x` whole on each rank, a local tensor; its gradient is the sum over ranks."""
        distributed = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        whole = distributed.redistribute(placements=[Replicate()])  # backward, this is where gradients are summed
        return whole.to_local(grad_placements=[Partial()])


class NormOverRanks(nn.LayerNorm):
    """`nn.LayerNorm` over the heads of all ranks, of which each has its own: `(..., dimensions of the rank's heads)`.

        mean = mean_r mean_r(x)        var = mean_r var_r(x) + mean_r (mean_r(x) - mean) ** 2

    So two numbers travel for each row. The parameters are those of `norm`, cut by heads once they are distributed.
    """

    def __init__(self, norm: nn.LayerNorm, heads: RankHeads) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = norm.normalized_shape, norm.eps, norm.elementwise_affine
        self.weight, self.bias, self.training = norm.weight, norm.bias, norm.training
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        mean = wide.mean(-1, keepdim=True)
        moments = torch.cat([mean, (wide - mean).square().mean(-1, keepdim=True)], -1)
        means, variances = self.heads.every(moments).view(*x.shape[:-1], self.heads.mesh.size(), 2).unbind(-1)
        mean = means.mean(-1, keepdim=True)
        variance = variances.mean(-1, keepdim=True) + (means - mean).square().mean(-1, keepdim=True)
        weight, bias = self.heads.part(self.weight), self.heads.part(self.bias)
        out: Tensor = (wide - mean) * torch.rsqrt(variance + self.eps) * weight + bias
        return out if torch.is_autocast_enabled(x.device.type) else out.to(x.dtype)  # as nn.LayerNorm under autocast


def distribute_values(state: MutableMapping[str, Any], prefix: str, module: nn.Module) -> None:
    """Make whole tensors in `state` the DTensors that the parameters of `module`, at `prefix`, can be loaded from."""
    for name, parameter in module.named_parameters():
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:
            state[prefix + name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
