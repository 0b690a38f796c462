"""Problems by name: what the arguments of a pattern and a call stand at where they are not given. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dilkit.device import Device, why_float32
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.pattern import Pattern
from dilkit.tools.console.text import nearest


@dataclass(frozen=True)
class Preset:
    """A named problem: attention in one layer of a published model."""

    name: str
    what: str
    seq: int
    heads: int
    head_dim: int
    pattern: Pattern

    @property
    def defaults(self) -> dict[str, object]:
        """By the name of an argument, the value that it has where it is not given. The dtype is then the device's: `dtype_on`."""
        pattern = self.pattern
        sizes = dict(seq=self.seq, heads=self.heads, dim=self.head_dim, dtype=None)
        return sizes | dict(
            segments=pattern.segment_lengths, rates=pattern.dilation_rates, offset=pattern.offset, tail=pattern.tail
        )

    def dtype_on(self, device: Device) -> tuple[str, str]:
        """The dtype that suits a model in mixed precision on `device`, and why."""
        if "fp16_tensor_cores" in device.features:
            return "float16", f"{device.name} has tensor cores for it"
        if device.type == "cuda" and device.capability:
            return "float32", f"{device.name} has no tensor cores: {why_float32('float16', device.capability)}"
        return "float32", f"float16 is no faster on {device.type}"


_SLIDES = ARCHITECTURES["gigapath_slide_enc12l768d"]
PRESETS = {
    "gigapath": Preset(
        "gigapath",
        "GigaPath's slide encoder on 10,000 tiles",
        seq=10_001,  # with the class token
        heads=_SLIDES.num_heads,
        head_dim=_SLIDES.embed_dim // _SLIDES.num_heads,
        pattern=_SLIDES.pattern,
    )
}


def add_preset_argument(parser: argparse.ArgumentParser) -> None:
    """Add --preset: a `Preset`, None when it is not given."""
    known = ", ".join(f"{preset.name}: {preset.what}" for preset in PRESETS.values())
    text = f"a named problem, {known}; arguments that are given win over it, and without --dtype it is the device's"
    parser.add_argument("--preset", type=_preset, metavar="NAME", help=text)


def _preset(text: str) -> Preset:
    if text not in PRESETS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a known preset; known: {', '.join(PRESETS)}{nearest(text, PRESETS)}")
    return PRESETS[text]
