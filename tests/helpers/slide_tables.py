"""Small tables of slides with their files of tile features, and a small encoder for them."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.integrations.gigapath.finetuning import look_through, read_labels
from dilkit.integrations.gigapath.finetuning.labels import Labels
from dilkit.integrations.gigapath.finetuning.model import SlideFile

WIDTH = 6
SPLITS = ("train", "train", "val", "test")


def table(folder: Path, header: str, *lines: str) -> Path:
    path = folder / "labels.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def write_slide(path: Path, tiles: int, width: int = WIDTH, **said):
    generator = torch.Generator().manual_seed(sum(path.stem.encode()))
    coords = 256 * torch.stack((torch.arange(tiles) % 5, torch.arange(tiles) // 5), dim=1)
    torch.save({"features": torch.randn(tiles, width, generator=generator), "coords": coords, **said}, path)


def cohort(folder: Path, slides: int = 12, survival: bool = False) -> tuple[Labels, tuple[SlideFile, ...]]:
    """Slides of different lengths, each of a patient of its own, half of them to learn from."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for i in range(slides):
        write_slide(folder / f"s{i}.pt", 3 + i % 7)
        target = f"{1 + i // 2},{int(i % 3 > 0)}" if survival else "ab"[(i // 4 + i) % 2]
        lines.append(f"s{i},{target},p{i},{SPLITS[i % 4]}")
    labels = read_labels(table(folder, f"slide,{'time,event' if survival else 'label'},patient,split", *lines))
    return labels, look_through(labels, folder)


def tiny_encoder(seed: int = 0, lengths: Sequence[int] = (4, 8), **changes) -> SlideEncoder:
    sizes = dict(embed_dim=16, depth=2, num_heads=2, in_chans=WIDTH, ngrids=8, dilation_rates=(1, 2))
    options = {name: changes.pop(name) for name in ("activation_checkpointing", "dtype") if name in changes}
    torch.manual_seed(seed)
    return SlideEncoder(SlideEncoderConfig(**sizes | changes, segment_lengths=tuple(lengths)), **options)
