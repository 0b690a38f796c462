"""Distances as biases: `Alibi` along the sequence, `CoordinateAlibi` of coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilkit.bias.base import Bias, PlacedBias
from dilkit.bias.checks import check_reach, floating
from dilkit.bias.evaluated import measured
from dilkit.bias.form import METRICS, BiasForm, LoweredBias
from dilkit.checks import integer, one_of


def alibi_slopes(heads: int) -> Tensor:
    """Compute the slopes of ALiBi, `(heads,)`, float32: `2 ** (-8 * (h + 1) / heads)` where `heads` is a power of two.

    Other numbers of heads get the slopes of the largest power of two below, then every other one of twice as many
    (arXiv 2108.12409, and its authors' code). Raises ValueError for less than one head.

        >>> from dilkit import alibi_slopes
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    integer("heads", heads, at_least=1)
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes)


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """A penalty by the distance along the sequence (ALiBi, arXiv 2108.12409).

        bias(h, i, j) = -slopes[h] * |i - j|

    `slopes`: floating-point `(heads,)`, which may require a gradient. Raises TypeError or ValueError for other tensors, and for
    numbers that are not finite.

        >>> import torch
        >>> from dilkit import Alibi, Pattern, alibi_slopes, dilated_attention
        >>> q = k = v = torch.randn(1, 64, 4, 8)
        >>> dilated_attention(q, k, v, Pattern([16, 64], [1, 4]), bias=Alibi(alibi_slopes(4))).shape
        torch.Size([1, 64, 4, 8])
    """

    slopes: Tensor
    weights_name: ClassVar[str] = "slopes"

    def __post_init__(self) -> None:
        floating("slopes", self.slopes, (1,), "(heads,)")

    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        return -self.slopes[:, None, None] * (queries[:, None] - keys).abs()

    def lowered(self, dtype: Any) -> LoweredBias:
        return LoweredBias(BiasForm(), self.slopes.to(dtype)[:, None])


@dataclass(frozen=True, eq=False)
class CoordinateAlibi(PlacedBias):
    """A penalty by the distance of two tokens in space, as TITAN has it for the tiles of a slide (arXiv 2411.19666).

        bias(h, i, j) = -slopes[h] * |x_i - x_j|        euclidean: sqrt(sum d_k ** 2)    l1: sum |d_k|    max: max |d_k|

    - `slopes`: floating-point `(heads,)`, which may require a gradient, in units of one over those of the coordinates.
    - `coordinates`: floating-point `(batch, seq, 1 to 3)`, or `(seq, 1 to 3)` for all sequences; of packed sequences
      `(total, 1 to 3)`. They are refused if they require a gradient.
    - `metric`: "euclidean", "l1" or "max".
    - `neutral`: bool, shaped as `coordinates` without their last dimension. Rows that are True, such as a class token, have no
      place: their bias is 0 as queries and as keys, and their coordinates are not read. None: every row has a place.

    Coordinates are used in float32 (float64 beside float64). Beyond the whole numbers of that dtype, or of their own, they are
    refused: 256 in bfloat16, 2,048 in float16, 2**24 in float32. Raises TypeError or ValueError for what does not fit.

        >>> import torch
        >>> from dilkit import CoordinateAlibi, Pattern, dilated_attention
        >>> q = k = v = torch.randn(1, 64, 4, 8)
        >>> tiles = torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1).flatten(0, 1)
        >>> dilated_attention(q, k, v, Pattern.dense(), bias=CoordinateAlibi(torch.full((4,), 0.5), tiles)).shape
        torch.Size([1, 64, 4, 8])
    """

    slopes: Tensor
    coordinates: Tensor
    metric: str = "euclidean"
    neutral: Tensor | None = None
    weights_name: ClassVar[str] = "slopes"

    def __post_init__(self) -> None:
        floating("slopes", self.slopes, (1,), "(heads,)")
        one_of("metric", self.metric, METRICS)
        placed = self.coordinates
        if self.neutral is not None and isinstance(placed, Tensor) and placed.layout is torch.strided:
            self._check_neutral(self.neutral)
            placed = placed.masked_fill(self.neutral[..., None], 0.0)
        floating("coordinates", placed, (2, 3), "(batch, seq, 1 to 3) or (seq, 1 to 3)")
        if not 1 <= self.coordinates.shape[-1] <= 3:
            raise ValueError(f"coordinates has shape {tuple(self.coordinates.shape)}; 1 to 3 numbers a row are needed")
        if self.coordinates.requires_grad:
            raise ValueError("coordinates requires a gradient, which is not computed; pass coordinates.detach()")
        check_reach("coordinates", placed, self.coordinates.dtype)

    def _check_neutral(self, rows: Any) -> None:
        if not isinstance(rows, Tensor) or rows.dtype != torch.bool:
            kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"neutral is {kind}; a bool torch.Tensor is needed, True = a row without a place")
        if rows.shape != self.coordinates.shape[:-1]:
            needed = f"that of the rows of coordinates {tuple(self.coordinates.shape[:-1])} is needed"
            raise ValueError(f"neutral has shape {tuple(rows.shape)}; {needed}")
        if rows.device != self.coordinates.device:
            raise ValueError(f"neutral is on {rows.device}, coordinates on {self.coordinates.device}; one device is needed")

    def matrix(self, queries: Tensor, keys: Tensor) -> Tensor:
        x = self.coordinates.to(torch.promote_types(self.slopes.dtype, self.coordinates.dtype))
        distance = measured(x[..., queries, :].unsqueeze(-2) - x[..., keys, :].unsqueeze(-3), self.metric)
        if self.neutral is not None:
            distance = distance.masked_fill(self.neutral[..., queries, None] | self.neutral[..., None, keys], 0.0)
        return -self.slopes[:, None, None] * distance.unsqueeze(-3)

    def lowered(self, dtype: Any) -> LoweredBias:
        x = self.coordinates if self.neutral is None else self.coordinates.masked_fill(self.neutral[..., None], 0.0)
        if x.dtype.itemsize > dtype.itemsize:
            check_reach("coordinates", x, dtype)
        x = x.to(dtype) if self.neutral is None else x.to(dtype).masked_fill(self.neutral[..., None], math.nan)
        form = BiasForm(dims=x.shape[-1], metric=self.metric, placed=True, neutral=self.neutral is not None)
        return LoweredBias(form, self.slopes.to(dtype)[:, None], x if x.dim() == 3 else x[None])
