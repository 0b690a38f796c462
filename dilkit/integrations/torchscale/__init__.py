"""torchscale's `DilatedAttention`, computed by dilkit: on any device, with no flash-attn.

install.py   the classes that are patched, and the end of it
forward.py   one call of the patched `forward`
proving.py   the program that compares a class of a version that is not tested
weights.py   weights to and from `dilkit.MultiheadDilatedAttention`
"""

from dilkit.integrations.torchscale.install import Installation as Installation
from dilkit.integrations.torchscale.install import install as install

__all__ = ["Installation", "install"]
