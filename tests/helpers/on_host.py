"""The CUDA backend as it is, but for the device: its kernels run on the CPU."""

from __future__ import annotations

from dataclasses import replace

from helpers.host_launcher import HostLauncher

from dilkit.backends.cuda.backend import CupyRaw
from dilkit.device import Capability

FP32: Capability = (5, 2)
TENSOR_CORES: Capability = (8, 0)


class OnHost(CupyRaw):
    """The backend as it is, but for the device: the CPU, which does as a device of `capability` does."""

    requires = ("torch",)
    limits = replace(CupyRaw.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -100

    def __init__(self, capability: Capability) -> None:
        super().__init__(HostLauncher(order="random", workers=1), capability)
        self.name = "cupy_raw on sm_{}{}".format(*capability)  # type: ignore[misc]
