"""Where the rows of a tensor may lie for a kernel. Calls are views, so a whole tensor is handed over as it is, or as a copy.

    CPU      no two rows share memory
    CUDA     every row begins at a multiple of 16 bytes, or of a row that is shorter
    cuDNN    as CUDA, and no stride is 0; any others, for each row of each problem is addressed by three strides

torch keeps cuDNN's plan of a backward pass by the sizes and strides of query, key and value, but the plan holds those of `out`
and `dout` too: they have to follow from the query's (`equal_strides` of `SdpaKernel`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VECTOR_BYTES = 16


def cpu_layout(x: Tensor) -> Tensor:
    """`x` `(batch, seq, heads, head_dim)`, or a copy if its rows share memory.

    torch's kernel leaves results unwritten if rows of the query do, and refuses other such tensors of 16 bits.
    """
    return x.contiguous() if x.stride(1) < x.shape[3] else x


def cuda_layout(x: Tensor) -> Tensor:
    """`x` `(batch, seq, heads, head_dim)`, or a copy if its rows do not begin where kernels read whole vectors."""
    import torch

    size = x.element_size()
    places = (x.data_ptr(), *(stride * size for stride in _strides(x)))
    unit = math.gcd(VECTOR_BYTES, x.shape[3] * size)
    if all(place % unit == 0 for place in places):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` would leave a contiguous part of a tensor where it is


def cudnn_layout(x: Tensor) -> Tensor:
    """`cuda_layout`, or a copy if `x` is expanded: cuDNN takes no stride of 0."""
    return x.contiguous() if 0 in _strides(x) else cuda_layout(x)


def _strides(x: Tensor) -> list[int]:
    """The strides that are used, but for the last."""
    return [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
