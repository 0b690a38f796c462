"""Each of torch's fused kernels as a backend of its own, `sdpa:flash` and so on: to be measured and verified one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS, SdpaKernel
from dilkit.registry import register_backend, unregister_backend


class _OneKernel(SDPA):
    priority = -1  # never chosen automatically before the whole

    def __init__(self, kernel: SdpaKernel) -> None:
        super().__init__((kernel,))
        self.name = f"sdpa:{kernel.name}"


@contextmanager
def one_kernel_backends(device: str) -> Iterator[tuple[str, ...]]:
    """Within the block, each kernel for `device` is registered as a backend; yield their names."""
    backends = [_OneKernel(kernel) for kernel in KERNELS if kernel.limits.devices and device in kernel.limits.devices]
    for backend in backends:
        register_backend(backend)
    try:
        yield tuple(backend.name for backend in backends)
    finally:
        for backend in backends:
            unregister_backend(backend.name)
