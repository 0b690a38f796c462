"""How tensor cores round sums of products, and how far off powers of two may be: by capability, as measured on devices.

Products of halves are exact. Those of a group, and the sum so far, are cut off to some bits after the leading place of the
largest, added exactly, and the sum is cut off to fp32, towards zero: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of
NVIDIA tensor cores", PeerJ Computer Science 7:e330 (2021), of V100, T4 and A100. How many make a group, and how many bits: Xie,
Wang, Yang, Yang, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv:2511.10909 (2025), of Turing
to Blackwell, whose code (github.com/microsoft/MMA-Sim) has the numbers below.
"""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.device import Capability


@dataclass(frozen=True)
class Rounding:
    """`group` products at a time, cut off to `fraction` bits; 0: each instruction rounds once. `ulps`: powers of 2 are off by as
    many units of the last place, at most."""

    group: int = 0
    fraction: int = 0
    ulps: int = 0


ONCE = Rounding()
POWERS = 2
"""Units that `ex2.approx.ftz.f32` may be off, over all numbers (PTX ISA, Floating Point Instructions: ex2)."""

MEASURED = {(9, 0): Rounding(16, 25, POWERS), (8, 0): Rounding(8, 24, POWERS), (7, 5): Rounding(8, 24, POWERS)}
"""Each from a capability on. Of a group of 8, Turing's instruction has one, Ampere's two."""


def measured(capability: Capability) -> Rounding:
    """That of a device. Before 7.5 no kernel uses tensor cores."""
    return next((rounding for since, rounding in MEASURED.items() if capability >= since), Rounding(ulps=POWERS))
