"""Published rates of GPUs: what each unit does at most, and in which document of NVIDIA.

Where two rates are said, the higher is here, so that bounds of times are bounds by either: of P100 the whitepaper
says 720 GB/s, of T4 the datasheet 300, of B200 the driver 7,672, and at its clock fp32 has 75 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.device import Capability

WARP, SPECIAL, SHARED_BYTES = 32, 16, 128
"""Threads of a warp; special functions, and bytes of shared memory, that a multiprocessor does in a clock cycle: NVIDIA, CUDA C++
Programming Guide 13.1, Compute Capabilities (special function units of 6.0 and 7.5 to 10.0; 32 banks of 4 bytes)."""

SHUFFLED = 32
"""Threads of a warp shuffle in a cycle: NVIDIA, CUDA C++ Best Practices Guide, Throughput of Native Arithmetic Instructions."""


@dataclass(frozen=True)
class Card:
    """A GPU: FLOP/s of dense products of halves with sums in fp32 (0: no tensor cores that the kernels use) and of fp32, bytes/s
    of its memory, at its highest clock. `lanes`: fp32 operations of a multiprocessor in a cycle, by the Programming Guide."""

    name: str
    capability: Capability
    tensor: float
    fp32: float
    memory: float
    lanes: int
    source: str

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def cycles(self) -> float:
        """Clock cycles of all multiprocessors in a second: an fp32 lane does two FLOPs in each."""
        return self.fp32 / (2 * self.lanes)


CARDS = (
    Card("P100", (6, 0), 0.0, 10.6e12, 732e9, 64, "NVIDIA Tesla P100 (SXM2), datasheet"),
    Card("T4", (7, 5), 65e12, 8.1e12, 320e9, 64, "NVIDIA T4 Tensor Core GPU, product page"),
    Card("A100", (8, 0), 312e12, 19.5e12, 1555e9, 64, "NVIDIA A100 Tensor Core GPU, whitepaper, table 4 (SXM4, 40 GB)"),
    Card("RTX 4090", (8, 9), 165.2e12, 82.6e12, 1008e9, 128, "NVIDIA Ada GPU Architecture, whitepaper 2.02, appendix A"),
    Card("H100", (9, 0), 989.4e12, 66.9e12, 3352e9, 128, "NVIDIA H100 Tensor Core GPU, whitepaper 1.04, table 3 (SXM5)"),
    Card("B200", (10, 0), 2250e12, 80e12, 8e12, 128, "NVIDIA Blackwell Architecture, technical brief (HGX B200)"),
)
