"""Positions of queries among the keys, where there are not as many of both.

query i has the position  offset + i       causal: it sees keys 0 .. offset + i

causal     keys     0 1 2 3 4 5 6     by default the last query is the last key
           queries        0 1 2 3     offset = 7 - 4
otherwise  offset = 0
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dilkit.checks import LONGEST, integer
from dilkit.inputs import Inputs
from dilkit.op.boundary import check_device, check_memory, check_tensor
from dilkit.problem import Problem, default_offset


def with_offset(inputs: Inputs, query_offset: int | Tensor) -> tuple[Inputs, int | None]:
    """Return inputs with the offsets of each sequence, and the offset of all. Raises TypeError or ValueError for none."""
    if isinstance(query_offset, Tensor):
        return inputs._replace(query_offset=query_offset), None
    if inputs.cu_seqlens is not None:
        raise ValueError("query_offset of packed sequences differs by sequence; an int32 tensor (sequences,) is needed, or None")
    offset = integer("query_offset", query_offset)
    if abs(offset) > LONGEST // 2:
        raise ValueError(f"query_offset={offset} is farther from the keys than a sequence can be long")
    return inputs, offset


def packed_alike(inputs: Inputs) -> bool:
    """True if sequences are packed and each has as many keys as queries."""
    return inputs.cu_seqlens is not None and inputs.cu_seqlens_k is None


def positions_of(inputs: Inputs, query_offset: int | None, is_causal: bool, longest: int) -> dict[str, int | None]:
    """Return a `Problem`'s fields for queries: nothing where query i is key i. `longest`: of packed sequences, else 0."""
    queries, keys = inputs.query.shape[1], inputs.key.shape[1]
    if inputs.cu_seqlens_k is not None and inputs.cu_seqlens is None:
        raise ValueError("cu_seqlens_k is given without cu_seqlens; both are needed")
    if longest:
        is_square = inputs.cu_seqlens_k is None and inputs.query_offset is None
        return {} if is_square else dict(queries=longest, query_offset=None)
    if inputs.query_offset is not None:
        return dict(queries=queries, query_offset=None)
    offset = default_offset(queries, keys, is_causal) if query_offset is None else query_offset
    return {} if queries == keys and offset == 0 else dict(queries=queries, query_offset=offset)


def equal_widths(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None, int | None]:
    """Return query, key and value of one head_dim by zeros, the scale, and the head_dim of `out` if it is another."""
    if not (isinstance(value, Tensor) and isinstance(key, Tensor) and isinstance(query, Tensor)):
        return query, key, value, scale, None
    if value.dim() < 3 or key.shape[-1] == value.shape[-1] or query.shape[-1] != key.shape[-1]:
        return query, key, value, scale, None
    narrow, width = key.shape[-1], value.shape[-1]
    if narrow == 0:
        return query, key, value, scale, None
    if narrow > width:
        return query, key, pad(value, (0, narrow - width)), scale, width
    query, key = (pad(x, (0, width - narrow)) for x in (query, key))
    return query, key, value, narrow**-0.5 if scale is None else scale, None


def check_offset(problem: Problem) -> None:
    """Raise ValueError for what has no meaning where query i is not key i."""
    pattern, offset = problem.pattern, problem.query_offset
    if pattern.tail == "zeros":
        raise ValueError('tail="zeros" pads sequences of as many queries as keys; use tail="exact"')
    if (branch := pattern.given_branch) is not None:
        raise ValueError(f"{branch.argument} is of as many queries as keys; give a pattern without {branch.call()}")
    if problem.bias is not None and problem.bias.placed:
        inside = offset is not None and offset >= 0 and offset + (problem.queries or 0) <= problem.seq
        if not inside or problem.varlen:
            raise ValueError("the bias has coordinates of the keys: by query_offset each query of a batch has to be one of them")


def check_offsets(inputs: Inputs) -> None:
    offset, starts = inputs.query_offset, inputs.cu_seqlens
    check_tensor("query_offset", offset)
    assert offset is not None
    count = inputs.query.shape[0] if starts is None else len(starts) - 1
    if offset.dtype != torch.int32 or offset.shape != (count,) or not offset.is_contiguous():
        what = "(batch,)" if starts is None else "(sequences,)"
        shape = f"{offset.dtype} of shape {tuple(offset.shape)}"
        raise ValueError(f"query_offset is {shape}; an integer, or int32 {what} = ({count},), contiguous, is needed")
    check_device("query_offset", offset, inputs.query)
    check_memory(("query_offset",), (offset,))
