"""GigaPath's slide encoder on dilated attention of any backend: `load_slide_encoder`.

tiles (batch, n, in_chans) -> patch_embed + sin-cos positions of coords -> class token first -> encoder layers -> norm -> pooling

    config.py       sizes and patterns of the published architectures
    inputs.py       tensors of slides, checked and packed
    positions.py    positions by coordinate
    spacing.py      whether tiles lie as tiles of their size do
    layers.py       one encoder layer, on packed rows of several slides
    encoder.py      the module
    over_ranks.py   one slide over several ranks
    checkpoint.py   loading of published weights
    features/       files of tile features
    cohort/         slides of a cohort, embedded one file after the other
    attention_map.py    what the class token looks at

Names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ARCHITECTURES": "config",
    "SlideEncoder": "encoder",
    "SlideEncoderConfig": "config",
    "attention_map": "attention_map",
    "load_slide_encoder": "checkpoint",
    "read_features": "features",
    "read_header": "features",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.attention_map import attention_map as attention_map
    from dilkit.integrations.gigapath.checkpoint import load_slide_encoder as load_slide_encoder
    from dilkit.integrations.gigapath.config import ARCHITECTURES as ARCHITECTURES
    from dilkit.integrations.gigapath.config import SlideEncoderConfig as SlideEncoderConfig
    from dilkit.integrations.gigapath.encoder import SlideEncoder as SlideEncoder
    from dilkit.integrations.gigapath.features import read_features as read_features
    from dilkit.integrations.gigapath.features import read_header as read_header


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
