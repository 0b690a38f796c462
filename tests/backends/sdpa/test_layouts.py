"""Which tensors kernels are given as they are, and with which strides cuDNN's operators are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.sdpa import aten
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS
from dilkit.backends.sdpa.layouts import cpu_layout, cuda_layout, cudnn_layout
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.tools.bench.gpu.cases import CONFIGURATIONS

CUDNN = next(kernel for kernel in KERNELS if kernel.name == "cudnn")
HALF = torch.empty(2, 6, 4, 40, dtype=torch.bfloat16)
"""`(batch, seq, heads, head_dim)`, of rows of 80 bytes."""
WIDE = torch.empty(2, 6, 4, 3 * 40 + 4, dtype=torch.bfloat16)
"""Query, key and value side by side, and 4 numbers more."""


@pytest.mark.parametrize(
    ("layout", "x", "copied"),
    [
        (cuda_layout, HALF, False),
        (cuda_layout, HALF.transpose(0, 1), False),
        (cuda_layout, HALF[:, 1:5:2, 1:], False),
        (cuda_layout, WIDE[..., 40:80], True),  # rows begin at multiples of 8 bytes
        (cuda_layout, WIDE[:1, :1, :1, 40:80], False),  # its one row does not
        (cuda_layout, WIDE[:1, :1, :1, 4:44], True),
        (cuda_layout, torch.empty(2, 6, 4, 7, dtype=torch.float32), False),  # whole rows are no multiple of 16 bytes
        (cuda_layout, HALF[:, :, :1].expand(-1, -1, 4, -1), False),
        (cudnn_layout, HALF[:, :, :1].expand(-1, -1, 4, -1), True),
        (cudnn_layout, HALF[:1].expand(1, -1, -1, -1), False),
        (cudnn_layout, WIDE[..., 40:80], True),
        (cudnn_layout, HALF[:, 1:5:2], False),
        (cpu_layout, WIDE[..., 40:80], False),
        (cpu_layout, HALF[:, :1].expand(-1, 6, -1, -1), True),
    ],
)
def test_what_is_copied(layout: Callable[[Tensor], Tensor], x: Tensor, copied: bool) -> None:
    found = layout(x)
    assert (found is not x) == copied
    assert found.is_contiguous() or not copied
    assert found.shape == x.shape
    assert layout is cpu_layout or x.shape[3] == 7 or found.data_ptr() % 16 == 0


Given = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset of a query."""

QUERIES: dict[str, list[Given]] = {
    "A": [
        ((64, 8, 2048, 128), (2097152, 128, 1024, 1), 0),
        ((32, 4, 2048, 128), (4194304, 256, 2048, 1), 0),
        ((32, 4, 2048, 128), (4194304, 256, 2048, 1), 1152),
        ((16, 4, 2048, 128), (8388608, 1152, 4096, 1), 0),
        ((16, 4, 2048, 128), (8388608, 1152, 4096, 1), 512),
        ((8, 8, 2048, 128), (16777216, 1152, 8192, 1), 0),
        ((4, 8, 2048, 128), (33554432, 1152, 16384, 1), 0),
    ],
    "B": [
        ((64, 8, 512, 128), (524288, 128, 1024, 1), 0),
        ((32, 4, 512, 128), (1048576, 256, 2048, 1), 0),
        ((32, 4, 512, 128), (1048576, 256, 2048, 1), 1152),
    ],
    "C": [
        ((512, 8, 2048, 128), (2097152, 128, 1024, 1), 0),
        ((128, 4, 2048, 128), (8388608, 1152, 4096, 1), 0),
        ((128, 4, 2048, 128), (8388608, 1152, 4096, 1), 512),
        ((32, 8, 2048, 128), (33554432, 1152, 16384, 1), 0),
        ((8, 8, 2048, 128), (134217728, 1152, 65536, 1), 0),
        ((2, 8, 2048, 128), (536870912, 1152, 262144, 1), 0),
    ],
}
"""What cuDNN is given for 8 heads of 128, by configuration of the suite `gpu`. Heads of the next offset begin 1152 numbers on, a
row and a head. All strides and offsets are multiples of 8 numbers, 16 bytes."""


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Tensor]]]:
    """The calls of torch's operators so far: name, and tensors `(batch, heads, rows, head_dim)` given."""
    calls, operator = [], aten._aten

    def recorded(name: str) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append((name, [x for x in arguments if isinstance(x, Tensor) and x.dim() == 4]))
            return operator(name)(*arguments, **options)

        return run

    monkeypatch.setattr(aten, "_aten", recorded)
    return calls


def meta(problem: Problem, width: int = 128) -> list[Tensor]:
    """Query, key, value and the gradient of the output of `problem`, without memory: slices of rows of `width` numbers."""
    heads = problem.heads, problem.kv_heads, problem.kv_heads, problem.heads
    made = (torch.empty(1, problem.seq, h, width, dtype=torch.bfloat16, device="meta") for h in heads)
    return [x[..., : problem.head_dim] for x in made]


@pytest.mark.parametrize("letter", QUERIES)
def test_cudnn_is_given_views_alone(letter: str, operators: list[tuple[str, list[Tensor]]]) -> None:
    posed = CONFIGURATIONS[letter].problem(128, 1, device=Device.assume("sm_90"), dtype="bfloat16", requires_grad=True)
    (q, k, v, dout), backend = meta(posed), SDPA((CUDNN,))
    out, lse = backend.forward(Inputs(q, k, v), posed)
    backend.backward(dout, Inputs(q, k, v), out, lse, posed)
    given = [(name, [(tuple(x.shape), x.stride(), x.storage_offset()) for x in found]) for name, found in operators]
    forward, backward = (f"_scaled_dot_product_cudnn_attention{text}" for text in ("", "_backward"))
    assert given[: len(given) // 2] == [(forward, 3 * [query]) for query in QUERIES[letter]]
    for (name, (*views, lse_of_call)), query in zip(given[len(given) // 2 :], QUERIES[letter], strict=True):
        assert (name, views) == (backward, 5 * [query])  # dout, query, key, value and out
        assert lse_of_call == ((*query[0][:3], 1), (query[0][1] * query[0][2], query[0][2], 1, 1), 0)


@pytest.mark.parametrize("at", ["query", "dout"])
def test_a_backward_pass_of_cudnn_has_equal_strides(at: str, operators: list[tuple[str, list[Tensor]]]) -> None:
    """torch's plan of it would be used again for another layout of `dout` or `out`: it is kept by those of the others."""
    posed = Problem(
        pattern=Pattern([64, 256], [1, 4]), seq=256, heads=8, head_dim=64, dtype="bfloat16", device=Device.assume("sm_90")
    )
    (q, k, v, dout), (wide, *_) = meta(posed, 64), meta(posed, 192)
    given = dict(dout=dout, query=q) | {at: wide}
    out, lse = torch.empty_like(q), torch.empty(1, 8, 256, device="meta")
    SDPA((CUDNN,)).backward(given["dout"], Inputs(given["query"], k, v), out, lse, posed)
    for _, (of_dout, query, _, _, of_out, _) in operators:
        assert of_dout.stride() == query.stride() == of_out.stride()


@pytest.mark.parametrize("dims", [3, 4])
def test_lse_has_the_form_that_this_torch_gives_it_for_cudnn(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(aten, "_aten", lambda name: lambda *arguments, **options: given.extend(arguments) or (None, None, None))
    x, lse = torch.empty(2, 3, 4, 8, device="meta"), torch.empty(2, 3, 4, device="meta")
    made = torch.empty(2, 3, 4, 1, device="meta") if dims == 4 else lse
    monkeypatch.setattr(torch.ops.aten._scaled_dot_product_cudnn_attention, "default", lambda *_, **options: (x, made))
    aten._cudnn_lse_dims.cache_clear()
    aten.cudnn_backward(x, x, x, x, x, lse, None, False, 1.0)
    aten._cudnn_lse_dims.cache_clear()
    assert given[5].shape == made.shape
