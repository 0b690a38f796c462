"""Small inputs, one function that exercises every output, and backends that log their calls."""

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import Pattern, dilated_attention
from dilkit.backends.reference import Reference
from dilkit.bias.form import BiasForm
from dilkit.op.call_options import CallOptions, encode

PATTERN = Pattern([8, 16], [1, 2])
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler at run time")
TORCH_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")


def tensors(
    batch: int = 2, seq: int = 20, heads: int = 4, kv_heads: int = 4, head_dim: int = 8, **options
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(batch, seq, heads, head_dim, **options)
    key, value = (torch.randn(batch, seq, kv_heads, head_dim, **options) for _ in range(2))
    return query, key, value


def random_leaves(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def starts_of(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def attend(query: Tensor, key: Tensor, value: Tensor, **options):
    return dilated_attention(query, key, value, PATTERN, **{"backend": "reference", **options})


def encode_call(
    pattern: Pattern,
    is_causal: bool,
    requires_grad: bool,
    backend: str,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    bias: BiasForm | None = None,
) -> str:
    """Encode a call's options for torch's operators; `backend`: a name, or "" for the automatic choice."""
    return encode(CallOptions(pattern, is_causal, requires_grad, (backend,) if backend else (), dropout_p, softcap, bias))


def gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a sum that tells apart every element of every output of `function`."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(((x.double() + 1).sin() * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in outputs)
    total.backward()
    return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)


def differentiated(attend: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], uses: str = "out+lse") -> list[Tensor]:
    results = dict(zip(("out", "lse"), attend(*inputs), strict=True))
    draw = torch.Generator().manual_seed(7)
    losses = {
        name: (x.nan_to_num(neginf=0.0) * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum()
        for name, x in results.items()
    }
    grads = torch.autograd.grad(sum(losses[name] for name in uses.split("+")), inputs, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
    return [*(x.detach() for x in results.values()), *found]


def close(found: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 1e-12):
    for got, right in zip(found, want, strict=True):
        torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance)


class Recorder(Reference):
    priority = -100

    def __init__(self, name: str, log: list[tuple[str, str, int]]):
        super().__init__(name=name)
        self.log = log

    def forward(self, *args) -> tuple[Tensor, Tensor]:
        self.log.append((self.name, "forward", threading.get_ident()))
        return super().forward(*args)

    def backward(self, *args) -> tuple[Tensor, Tensor, Tensor]:
        self.log.append((self.name, "backward", threading.get_ident()))
        return super().backward(*args)
