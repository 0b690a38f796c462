"""The boundary between torch and the kernels: what the tensors of a call must be before a kernel takes their addresses.

They may come from `torch.ops` directly, or from `saved_tensors_hooks`. Shapes, strides, dtypes and devices are checked once
(`prepared_call.py`), and in each call that memory still is as large as they say (`check_memory`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from dilkit.checks import not_distributed
from dilkit.op._facts import first_beyond
from dilkit.problem import DTYPES

INPUTS = ("query", "key", "value")
SAVED = ("dout", "query", "key", "value", "out", "lse")
"""The tensors of the backward operator; those after `dout` were saved by the forward pass."""
MASK = "key_padding_mask"

MOST_LIKELY_HEADS = 256
"""Twice as many as large models have."""

TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def check_tensor(name: str, x: object, needed: str = "a torch.Tensor") -> Tensor:
    """Return `x`. Raises TypeError unless it is a tensor, and for a DTensor, whose shape is not that of its local rows."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; {needed} is needed")
    if type(x) is not Tensor:
        not_distributed(name, x)
    return x


def check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(f"{name} is on {x.device} but query on {query.device}; move it with .to(query.device)")


def check_tensors(names: Sequence[str], tensors: tuple[Tensor, ...], is_square: bool = True) -> None:
    """Raise TypeError or ValueError, naming the tensor, unless those named `INPUTS` or `SAVED` fit; the mask may follow."""
    names = (*names, MASK)[: len(tensors)]
    by_name = dict(zip(names, tensors, strict=True))
    query, key, value = (by_name[name].shape for name in INPUTS)
    check_shapes(query, key, value, is_square)
    hint = "" if "dout" not in by_name else "; with saved_tensors_hooks, unpacking must give back what was packed"
    first, dtype, device = names[0], tensors[0].dtype, tensors[0].device
    if dtype not in TORCH_DTYPES:
        raise TypeError(f"{first} is {dtype}; one of {', '.join(DTYPES)} is needed")
    dtypes = {"lse": lse_dtype(dtype), MASK: torch.bool}
    shapes = {"dout": query, "out": query, "lse": torch.Size((query[0], query[2], query[1])), MASK: key[:2]}
    for name, x in by_name.items():
        if (x.dtype, x.device) != (dtypes.get(name, dtype), device):
            needed = f"{dtypes.get(name, dtype)} on {device} is needed beside {first}, which is {dtype}"
            raise TypeError(f"{name} is {x.dtype} on {x.device}; {needed}{hint}")
        if x.shape != shapes.get(name, x.shape):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {tuple(shapes[name])} is needed{hint}")


def check_shapes(query: torch.Size, key: torch.Size, value: torch.Size, is_square: bool = True) -> None:
    """Raise ValueError unless query, key and value of these shapes go together; `is_square`: with as many queries as keys."""
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {tuple(shape)}; (batch, seq, heads, head_dim) is needed")
    if key != value:
        raise ValueError(f"key has shape {tuple(key)} and value {tuple(value)}; they must be equal")
    if key != query:
        for name, at in (("batch", 0), ("seq", 1), ("head_dim", 3)):
            if key[at] != query[at] and (is_square or at != 1):
                raise ValueError(f"key has {name} {key[at]} and query {query[at]}; they must be equal")
        if key[2] < 1 or query[2] % key[2]:
            raise ValueError(f"key has {key[2]} heads, which does not divide the {query[2]} heads of query")
    if query[2] < 1 or query[3] < 1:
        raise ValueError(f"query has shape {tuple(query)}; at least one head and head_dim 1 are needed")


def warn_of_many_heads(query: Tensor) -> None:
    """Warn of a query with more heads than any model, and fewer rows: its dimensions are likely to be in another order."""
    seq, heads = query.shape[1:3]
    if heads > max(MOST_LIKELY_HEADS, seq):
        warnings.warn(
            f"query has shape {tuple(query.shape)}: {heads} heads of {seq} tokens. Tensors are (batch, seq, heads, head_dim); "
            "those of torch's scaled_dot_product_attention, (batch, heads, seq, head_dim), need .transpose(1, 2)",
            stacklevel=2,
        )


def span(x: Tensor) -> int:
    """Return the bytes from the first element to the end of the last; 0 for an empty tensor."""
    if 0 in x.shape:
        return 0
    last = 0
    for size, step in zip(x.shape, x.stride(), strict=True):
        last += (size - 1) * step
    return (1 + last) * x.itemsize


def check_memory(names: tuple[str, ...], tensors: tuple[Tensor, ...], spans: tuple[int, ...] | None = None) -> None:
    """Raise ValueError where a tensor reaches beyond its memory; `spans`: the `span` of each, if they are known."""
    beyond = first_beyond(tensors, tuple(map(span, tensors)) if spans is None else spans)
    if beyond >= 0:
        refuse_beyond(names[beyond], tensors[beyond])


def refuse_beyond(name: str, x: Tensor) -> NoReturn:
    place = f"shape {tuple(x.shape)}, strides {x.stride()}, offset {x.storage_offset()}"
    raise ValueError(
        f"{name} has {place}, beyond the {x.untyped_storage().nbytes()} bytes of its storage; was the storage resized?"
    )


def lies_in_rows(x: Tensor) -> bool:
    """True if kernels can read `x` as it is: its last dimension is contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def in_rows(x: Tensor) -> Tensor:
    return x if lies_in_rows(x) else x.contiguous()


def check_returned(backend: str, returned: object, wanted: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a backend's results, contiguous. Raises TypeError or ValueError unless they are like `wanted`, in own memory."""
    results = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if len(results) != len(wanted) or not all(isinstance(x, Tensor) for x in results):
        kinds = ", ".join(type(x).__name__ for x in results)
        raise TypeError(f"backend {backend!r} returned {kinds}; the tensors {', '.join(wanted)} are needed")
    taken = {x.untyped_storage().data_ptr(): "an input" for x in inputs}
    for (name, want), x in zip(wanted.items(), results, strict=True):
        if (x.shape, x.dtype, x.device) != (want.shape, want.dtype, inputs[0].device):
            needed = f"{want.dtype} {tuple(want.shape)} on {inputs[0].device} is needed"
            raise ValueError(f"backend {backend!r} returned {name} as {x.dtype} {tuple(x.shape)} on {x.device}; {needed}")
        other = taken.setdefault(x.untyped_storage().data_ptr(), name)
        if other != name:
            raise ValueError(f"backend {backend!r} returned {name} in the memory of {other}; a tensor of its own is needed")
    return tuple(x.contiguous() for x in results)


def empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate `out` like `query`, and `lse` `(batch, heads, seq)`: contiguous, uninitialised."""
    batch, seq, heads, _ = query.shape
    lse = torch.empty(batch, heads, seq, dtype=lse_dtype(query.dtype), device=query.device)
    return torch.empty_like(query, memory_format=torch.contiguous_format), lse


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
