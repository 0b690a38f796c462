"""GigaPath's slide encoder on dilated attention of any backend: `load_slide_encoder`.

tiles (batch, n, in_chans) -> patch_embed + sin-cos positions of coords -> class token first -> encoder layers -> norm -> pooling

    config.py       sizes and patterns of the published architectures
    positions.py    positions by coordinate
    spacing.py      whether tiles lie as tiles of their size do
    layers.py       one encoder layer, on packed rows of several slides
    encoder.py      the module
    over_ranks.py   one slide over several ranks
    checkpoint.py   loading of published weights
    hub.py          the files of names on the Hugging Face hub
    hdf5.py         HDF5 files, read by a process of their own
    features/       files of tile features
    cohort/         slides of a cohort, embedded one file after the other
    tile_attention.py   what the class token looks at
    longnet_vit.py      the encoder by the calls of GigaPath's own package
    installation.py     that encoder in packages that call GigaPath's
    __main__.py     a script after `install()`

Names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_HOMES = {
    "ARCHITECTURES": "config",
    "Installation": "installation",
    "SlideEncoder": "encoder",
    "SlideEncoderConfig": "config",
    "attention_map": "tile_attention",
    "create_model": "longnet_vit",
    "install": "installation",
    "load_slide_encoder": "checkpoint",
    "read_features": "features",
    "read_header": "features",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.checkpoint import load_slide_encoder as load_slide_encoder
    from dilkit.integrations.gigapath.config import ARCHITECTURES as ARCHITECTURES
    from dilkit.integrations.gigapath.config import SlideEncoderConfig as SlideEncoderConfig
    from dilkit.integrations.gigapath.encoder import SlideEncoder as SlideEncoder
    from dilkit.integrations.gigapath.features import read_features as read_features
    from dilkit.integrations.gigapath.features import read_header as read_header
    from dilkit.integrations.gigapath.installation import Installation as Installation
    from dilkit.integrations.gigapath.installation import install as install
    from dilkit.integrations.gigapath.longnet_vit import create_model as create_model
    from dilkit.integrations.gigapath.tile_attention import attention_map as attention_map

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
