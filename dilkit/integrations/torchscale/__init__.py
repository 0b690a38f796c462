"""torchscale's `DilatedAttention`, computed by dilkit: on any device, with no flash-attn."""

from dilkit.integrations.torchscale.install import Installation as Installation, install as install

__all__ = ["Installation", "install"]
