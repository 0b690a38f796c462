"""torchscale's `DilatedAttention`, computed by dilkit: on any device, with no flash-attn."""

from dilkit.integrations.patches import Installation
from dilkit.integrations.torchscale.install import install

__all__ = ["Installation", "install"]
