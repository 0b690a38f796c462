"""Choice between one kernel of our own and torch's operators to merge the results of a call on a CUDA device.

The kernel needs a device that Triton compiles for, and must prove right: in each process, for that takes milliseconds. Torch's
operators take about forty launches a call.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from dilkit import environment
from dilkit.backends.sdpa.accumulators import RowKernels, merge_lse
from dilkit.backends.sdpa.kernels import installed
from dilkit.device import capturing
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OLDEST = (8, 0)
"""The oldest capability that Triton supports."""


def why_eager(problem: Problem) -> str:
    """Return why torch's operators merge on the CUDA device of `problem`; empty if one kernel per call does."""
    if problem.device.platform == "hip":
        return "the kernel has not been tried on AMD's GPUs"
    capability = problem.device.capability or (0, 0)
    if capability < OLDEST:
        return f"Triton needs capability {OLDEST[0]}.{OLDEST[1]}"
    return "" if installed("triton") else "install triton"


def row_kernels(query: Tensor, problem: Problem) -> RowKernels | None:
    """Return the kernels that merge the results of calls; None where torch's operators do. Raises RuntimeError under capture."""
    if not query.is_cuda or why_eager(problem):
        return None
    trusted = environment.gpu_proof() == "off" or _proven(query.device, query.dtype, problem.head_dim)
    return _kernels() if trusted else None


def _kernels() -> RowKernels:
    from dilkit.backends.sdpa import row_kernels

    return cast(RowKernels, row_kernels)


@lru_cache(maxsize=256)
def _proven(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    if capturing(device):
        raise RuntimeError(
            f"the kernels that merge results of {dtype} and head_dim {head_dim} have not been proven on {device}, and cannot be "
            "while a CUDA graph is captured: make the same call once before"
        )
    try:
        reason = failure(_kernels(), device, dtype, head_dim)
    except Exception as error:  # Triton finds no C compiler, for example
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if reason:
        warnings.warn(
            f"backend sdpa merges by torch's operators on {device}: {reason}. Please report this, with what `dilkit doctor` "
            f"prints. {environment.GPU_PROOF.name}=off uses the kernels all the same",
            stacklevel=2,
        )
    return not reason


def failure(kernels: RowKernels, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return what `kernels` compute wrong for tensors of `dtype`, with sums in fp32 and in `dtype`; empty if nothing."""
    checks = {"merges": _merge_is_right, "sums of gradients": _add_is_right}
    wrong = [name for name, check in checks.items() if not check(kernels, device, dtype, head_dim)]
    return f"kernels compute wrong {' and '.join(wrong)} of {dtype} and head_dim {head_dim}" if wrong else ""


_PROBLEMS = 2, 3, 41
_ROUNDINGS = 32


def _merge_is_right(kernels: RowKernels, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    import torch

    lse, part_lse = (5 * _numbers(start, device, *_PROBLEMS) for start in (0, 1))
    lse[..., ::7] = part_lse[..., ::5] = -torch.inf
    want_lse, share, part_share = merge_lse(lse, part_lse)
    part, right = _numbers(2, device, *_PROBLEMS, head_dim).to(dtype), []
    for sums in {dtype, torch.float32}:
        out, sum_lse = _every_other_row(_numbers(3, device, *_PROBLEMS, head_dim).to(sums)), _every_other_row(lse.clone())
        want = share.unsqueeze(-1) * out.float() + part_share.unsqueeze(-1) * part.float()
        out[lse == -torch.inf] = torch.nan  # which must not be read
        kernels.merge(out, sum_lse, part.where((part_lse > -torch.inf).unsqueeze(-1), torch.nan), part_lse)
        right += [_near(out, want, sums), _near(sum_lse, want_lse, torch.float32)]
    return all(right)


def _add_is_right(kernels: RowKernels, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    import torch

    part, right = _numbers(4, device, *_PROBLEMS, head_dim).to(dtype), []
    for sums in {dtype, torch.float32}:
        total = _every_other_row(_numbers(5, device, *_PROBLEMS, head_dim).to(sums))
        want, want_of_group = total.float() + part.float(), total[:, :1].float() + part.float().sum(1, keepdim=True)
        kernels.add(group := _every_other_row(total[:, :1]).expand_as(part), part)
        kernels.add(total, part)
        right += [_near(total, want, sums), _near(group[:, :1], want_of_group, sums)]
    return all(right)


def _numbers(start: int, device: torch.device, *sizes: int) -> Tensor:
    """Make deterministic numbers from -1 to 1."""
    import torch

    count = torch.Size(sizes).numel()
    return torch.arange(start, start + count, device=device, dtype=torch.float32).sin_().view(sizes)


def _every_other_row(x: Tensor) -> Tensor:
    """Copy `x` `(batch, heads, rows, ...)` into every other row of a tensor `(batch, rows, heads, ...)`."""
    batch, heads, rows = x.shape[:3]
    rows_apart = x.new_zeros(batch, 2 * rows, heads, *x.shape[3:])[:, ::2].transpose(1, 2)
    return rows_apart.copy_(x)


def _near(found: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    import torch

    return torch.allclose(found.float(), want, rtol=0.0, atol=_ROUNDINGS * torch.finfo(dtype).eps)
