"""Rotary position embedding: queries and keys are rotated by their position, so that scores depend on distances."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit import plan
from dilkit.checks import real
from dilkit.device import capturing

DEFAULT_BASE = 10000.0


def rotary_embedding(x: Tensor, positions: Tensor | None = None, base: float = DEFAULT_BASE) -> Tensor:
    """Rotate `x` by positions (rotary embedding; RoFormer, arXiv 2104.09864, eq. 34) with half-split pairs.

        out[i]       = x[i]       cos(p t_i) - x[i + d/2] sin(p t_i)
        out[i + d/2] = x[i + d/2] cos(p t_i) + x[i]       sin(p t_i)        t_i = base ** (-2 i / d),  0 <= i < d/2

    `x` is `(batch, seq, heads, d)`, floating point, d even; p is the position of its row: `positions`, integers `(seq,)` or
    `(batch, seq)`, or else 0, 1, 2, ... The paper pairs neighbours (2i, 2i + 1) instead: trained weights fit only models that
    pair in the same way.

    Angles are computed in fp64, cosines and products in fp32 (fp64 for fp64 `x`), which is accurate for millions of tokens. The
    result has the dtype of `x`. Raises TypeError or ValueError naming the argument that does not fit.
    """
    return rotate(x, *rotary_tables(x, positions, base))


def rotary_tables(x: Tensor, positions: Tensor | None = None, base: float = DEFAULT_BASE) -> tuple[Tensor, Tensor]:
    """Compute `cos(p t_i)` and `sin(p t_i)` for the rows of `x`: `(seq, 1, d/2)`, or `(batch, seq, 1, d/2)`, as `positions`.

    The tables for 0, 1, 2, ... are kept in dilkit's byte-bounded cache (`dilkit.plan`).
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a torch.Tensor is needed")
    if x.dim() != 4 or not x.is_floating_point():
        what = f"shape {tuple(x.shape)} and dtype {x.dtype}"
        raise ValueError(f"x has {what}; floating-point (batch, seq, heads, head_dim) is needed")
    head_dim, base = even_head_dim(x.shape[-1]), real("base", base, above=0)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

    def make() -> Tensor:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be used for training later
            return _cos_sin(torch.arange(x.shape[1], device=x.device), head_dim, base, dtype)

    traced = torch.compiler.is_compiling() or type(x) is not Tensor or torch._C._are_functorch_transforms_active()
    if positions is not None:
        _check_positions(positions, x)
        cos, sin = _cos_sin(positions, head_dim, base, dtype)
    elif traced or capturing(x.device):  # a table made now would be a fake, or short-lived (CUDA graphs)
        cos, sin = _cos_sin(torch.arange(x.shape[1], device=x.device), head_dim, base, dtype)
    else:
        cos, sin = plan.cached(("rotary", x.shape[1], head_dim, base, dtype, x.device), make)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `(batch, seq, heads, d)` by the tables of `rotary_tables`. Returns a new tensor like `x`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def even_head_dim(head_dim: int) -> int:
    """Return `head_dim`. Raises ValueError if it is odd."""
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd; rotary embedding rotates pairs of dimensions and needs an even head_dim")
    return head_dim


def _cos_sin(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / -head_dim
    angles = positions[..., None, None].double() * base**exponents
    return torch.stack((angles.cos().to(dtype), angles.sin().to(dtype)))


def _check_positions(positions: Tensor, x: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is a {type(positions).__name__}; a torch.Tensor of integers is needed")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions is {positions.dtype}; integers are needed, such as torch.arange(seq)")
    batch, seq = x.shape[:2]
    if positions.dim() not in (1, 2) or positions.shape[-1] != seq or (positions.dim() == 2 and positions.shape[0] != batch):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}; (seq,) = ({seq},) or (batch, seq) = ({batch}, {seq}) is needed"
        )
    if positions.device != x.device:
        raise ValueError(f"positions is on {positions.device} but the rows on {x.device}; move it with .to({str(x.device)!r})")
