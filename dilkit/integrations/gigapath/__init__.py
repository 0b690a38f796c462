"""GigaPath's slide encoder on dilated attention of any backend: `load_slide_encoder`.

tiles (batch, n, in_chans) -> patch_embed + sin-cos positions of coords -> class token first -> encoder layers -> norm -> pooling

Names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_NAMES = {
    "checkpoint": "load_slide_encoder",
    "config": "ARCHITECTURES SlideEncoderConfig",
    "encoder": "SlideEncoder attention_map",
    "features": "read_features read_header",
    "installation": "Installation install",
    "longnet_vit": "create_model",
}

__all__ = sorted(" ".join(_NAMES.values()).split())

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.checkpoint import load_slide_encoder as load_slide_encoder
    from dilkit.integrations.gigapath.config import ARCHITECTURES as ARCHITECTURES, SlideEncoderConfig as SlideEncoderConfig
    from dilkit.integrations.gigapath.encoder import SlideEncoder as SlideEncoder, attention_map as attention_map
    from dilkit.integrations.gigapath.features import read_features as read_features, read_header as read_header
    from dilkit.integrations.gigapath.installation import install as install
    from dilkit.integrations.gigapath.longnet_vit import create_model as create_model
    from dilkit.integrations.patches import Installation as Installation

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
