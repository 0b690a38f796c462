"""Launches of the kernels in Triton on CUDA devices, on torch's current stream."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from dilkit.backends.triton.sizes import OLDEST, Sizes, beside_bias, sizes_for
from dilkit.device import Capability, capturing
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch

_LAUNCHING = Lock()
"""Triton's kernels are of the whole process, and one that a thread is loading is broken for another thread that launches it."""


class TritonLauncher(Protocol):
    """Runs the kernels in Triton."""

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        """How the kernel of a role divides its work; `low`: with tiles that are not tall."""
        ...

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Run so many programs after what was launched before. Does not wait."""
        ...


class DeviceLauncher:
    """Launches on the tensors' GPU. Triton compiles and loads a kernel there at its first launch."""

    def __init__(self, capability: Capability | None = None) -> None:
        self.capability = capability

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        capability = self.capability or problem.device.capability or OLDEST
        sizes = sizes_for(role, problem.dtype, problem.head_dim, capability, low)
        return sizes if problem.bias is None else beside_bias(sizes)

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        import torch

        device, options = arguments[0].data.device, {**constants, **compiling(sizes)}
        with torch.cuda.device(device), _LAUNCHING:
            if capturing(device):
                _expect_loaded(role, device, kernel(role).warmup(*arguments, grid=(programs,), **options))
            kernel(role)[(programs,)](*arguments, **options)


def compiling(sizes: Sizes) -> dict[str, Any]:
    """Triton's own options for a kernel of these sizes. Products and sums are fused, whatever its default."""
    return dict(num_warps=sizes.warps, num_stages=sizes.stages, enable_fp_fusion=True)


def kernel(role: str) -> Any:
    """The kernel of a role, as Triton compiles it."""
    from dilkit.backends.triton import backward, forward

    return {"forward": forward.forward, "dots": backward.dots, "dquery": backward.dquery, "dkeyvalue": backward.dkeyvalue}[role]


def _expect_loaded(role: str, device: torch.device, compiled: Any) -> None:
    """Raise RuntimeError for a kernel that is not loaded. A load that fails, as it would now, Triton never tries again."""
    if compiled.module is None:
        raise RuntimeError(
            f"kernel {role} is not loaded on {device}, and cannot be while a CUDA graph is captured: make the same call once "
            "before"
        )
