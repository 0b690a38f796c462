"""Launches of the kernels in Triton on CUDA devices, on torch's current stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from dilkit.backends.tiles.counters import Counters
from dilkit.backends.triton.sizes import OLDEST, RESIDENT_WARPS, Sizes, beside_bias, hip_sizes, sizes_for, step_sizes
from dilkit.device import Capability, capturing
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch

_FIRST = Lock()
"""Held for the first launch of a role on a device: it hashes the kernel's sources and makes Triton's driver, once a process."""
_ON_DEVICE: dict[torch.device, Lock] = {}
"""Held for each launch on a device. Triton keeps the compiled kernels of each device apart; one that a thread is loading there is
broken for another thread that launches it."""
_LAUNCHED: set[tuple[str, torch.device]] = set()


class TritonLauncher(Protocol):
    """Runs the kernels in Triton."""

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        """Return the sizes of the kernel of a role; `low`: with tiles that are not tall."""
        ...

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Run so many programs after what was launched before. Does not wait."""
        ...

    def resident(self, sizes: Sizes, device: torch.device) -> int:
        """Return about how many programs of these sizes run at once on all of `device`, at least 1."""
        ...

    def counter(self, device: torch.device) -> int:
        """Return the address of two int32 zeros on `device`, for the next launch there, which resets them to 0."""
        ...


class DeviceLauncher:
    """Launches on the tensors' GPU. Triton compiles and loads a kernel there at its first launch."""

    def __init__(self, capability: Capability | None = None) -> None:
        self.capability = capability
        self._counters = Counters()

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        if role == "stored":
            return step_sizes(problem)
        capability = self.capability or problem.device.capability or OLDEST
        sizes = sizes_for(role, problem.dtype, problem.head_dim, capability, low)
        sizes = sizes if problem.bias is None else beside_bias(sizes)
        return hip_sizes(sizes) if problem.device.platform == "hip" else sizes

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        import torch

        device, options = arguments[0].data.device, {**constants, **compiling(sizes)}
        with torch.cuda.device(device), _ON_DEVICE.setdefault(device, Lock()), _first_alone(role, device):
            if capturing(device):
                _expect_loaded(role, device, kernel(role).warmup(*arguments, grid=(programs,), **options))
            kernel(role)[(programs,)](*arguments, **options)
            _LAUNCHED.add((role, device))

    def resident(self, sizes: Sizes, device: torch.device) -> int:
        import torch

        return int(torch.cuda.get_device_properties(device).multi_processor_count) * (RESIDENT_WARPS // sizes.warps)

    def counter(self, device: torch.device) -> int:
        import torch

        with torch.cuda.device(device):
            return self._counters.address(device, torch.cuda.current_stream(device).cuda_stream, capturing(device))


def compiling(sizes: Sizes) -> dict[str, Any]:
    """Return Triton's own options for a kernel of these sizes. Products and sums are fused, whatever Triton's default."""
    return dict(num_warps=sizes.warps, num_stages=sizes.stages, enable_fp_fusion=True)


def kernel(role: str) -> Any:
    """Return the jitted kernel of a role."""
    from dilkit.backends.triton import attend_stored, backward, forward

    kernels = {"dots": backward.dots, "dquery": backward.dquery, "dkeyvalue": backward.dkeyvalue}
    return {"forward": forward.forward, "stored": attend_stored.attend_stored, **kernels}[role]


def _first_alone(role: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the lock for the first launch of a role on a device, nothing for later ones."""
    return nullcontext() if (role, device) in _LAUNCHED else _FIRST


def _expect_loaded(role: str, device: torch.device, compiled: Any) -> None:
    """Raise RuntimeError for a kernel that is not loaded. A load that fails, as it would now, Triton never tries again."""
    if compiled.module is None:
        raise RuntimeError(
            f"kernel {role} is not loaded on {device}, and cannot be while a CUDA graph is captured: make the same call once "
            "before"
        )
