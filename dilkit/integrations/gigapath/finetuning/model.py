"""The slides of a table of labels, looked through once before training, and the model of fine-tuning on slides by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.checks import shown
from dilkit.integrations.gigapath.checkpoint import Checkpoint, check_tile_encoder, config_of, load_tensors, load_weights, settled
from dilkit.integrations.gigapath.config import SIZES, SlideEncoderConfig, known_as
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.features import Features, features_in, read_features
from dilkit.integrations.gigapath.finetuning.labels import Labels, refuse
from dilkit.integrations.gigapath.positions import settled_tile_size


@dataclass(frozen=True)
class SlideFile:
    """A file of tile features, how many tiles it has, of which size they are, in pixels a side, and how many numbers each.

    `reading`: the arguments of `read_features` for it.
    """

    path: Path
    tiles: int
    tile_size: int
    width: int
    tile_encoder: str | None
    reading: Mapping[str, Any] = field(default_factory=dict)


def look_through(
    labels: Labels,
    folder: Path,
    tile_size: int | None = None,
    progress: Callable[[int], None] | None = None,
    tile_encoder: str | None = None,
    coords: Path | None = None,
    microns_per_pixel: float | None = None,
) -> tuple[SlideFile, ...]:
    """Read each slide once and return the files in the order of `labels`; `progress` is called with the number read so far.

    `tile_size`: the size of tiles where no file has it. `tile_encoder`, `coords`, `microns_per_pixel`: those of `read_features`.

    Raises ValueError naming the lines of `labels` whose slides have no file, or one that will not do: see `read_features`; tiles
    of another width or of another tile encoder than those of the first; tiles that lie as tiles of another size do.

        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath.finetuning import look_through, read_labels
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels.csv")
        ...     _ = path.write_text("slide,time,event\\na,12.5,1\\n")
        ...     torch.save({"features": torch.randn(5, 8), "coords": torch.zeros(5, 2)}, Path(folder, "a.pt"))
        ...     [slide] = look_through(read_labels(path), Path(folder))
        >>> slide.path.name, slide.tiles, slide.tile_size, slide.width
        ('a.pt', 5, 256, 8)
    """
    by_name = {path.stem: path for path in features_in([folder])}
    reading: dict[str, Any] = dict(tile_encoder=tile_encoder, coords=coords, microns_per_pixel=microns_per_pixel)
    several: list[SlideFile] = []
    complaints: list[str] = []
    for count, one in enumerate(labels.examples, 1):
        try:
            if one.slide not in by_name:
                raise ValueError(f"{folder} holds no file of features for slide {shown(one.slide)}")
            several.append(other := _file(by_name[one.slide], tile_size, reading))
            encoder, path = several[0].tile_encoder, several[0].path
            if other.width != several[0].width:
                raise ValueError(f"{other.path}: tiles have {other.width} features, but {several[0].width} in {path}")
            if None not in (encoder, other.tile_encoder) and encoder != other.tile_encoder:
                raise ValueError(f"{other.path}: features are of {other.tile_encoder!r}, but of {encoder!r} in {path}")
        except (ValueError, OSError) as error:
            complaints.append(f"line {one.line}: {error}")
        if progress:
            progress(count)
    refuse(labels.source, complaints)
    return tuple(several)


def slide_reader(files: Sequence[SlideFile], like: Tensor) -> Callable[[int], Features]:
    """Return a function that reads the slide of an index, as a batch of one, with tiles of `like`'s dtype and device."""

    def read(index: int) -> Features:
        one = files[index]
        tiles, coords, _, encoder = read_features(one.path, **one.reading)
        return Features(tiles[None].to(like), coords[None].to(like.device), one.tile_size, encoder)

    return read


def _file(path: Path, tile_size: int | None, reading: Mapping[str, Any]) -> SlideFile:
    features = read_features(path, **reading)
    tiles, width = features.tiles.shape
    try:
        check_tile_encoder(features.tile_encoder, reading["tile_encoder"] or "")
        size, _ = settled_tile_size(features.tile_size, tile_size, features.coords)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return SlideFile(path, tiles, size, width, features.tile_encoder, reading)


class SlideModel(nn.Module):
    """A linear head on the embedding of a slide, by the slide's index: `(outputs,)`.

    `read` gives the slide of an index. With `freeze` the encoder stays as it is, in eval mode, and each embedding is computed
    once.
    """

    def __init__(self, encoder: SlideEncoder, outputs: int, read: Callable[[int], Features], freeze: bool = False) -> None:
        super().__init__()
        weight = encoder.cls_token
        self.encoder, self.read, self.freeze = encoder, read, freeze
        self.head = nn.Linear(encoder.config.embed_dim, outputs, device=weight.device, dtype=weight.dtype)
        self._embeddings: dict[int, Tensor] = {}
        encoder.requires_grad_(not freeze)

    def train(self, mode: bool = True) -> SlideModel:
        super().train(mode)
        self.encoder.train(mode and not self.freeze)
        return self

    def forward(self, index: int) -> Tensor:
        if self.freeze and index not in self._embeddings:
            with torch.no_grad():
                self._embeddings[index] = self._embedding(index)
        out: Tensor = self.head(self._embeddings[index] if self.freeze else self._embedding(index))
        return out

    def trained(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    def _embedding(self, index: int) -> Tensor:
        slide = self.read(index)
        assert slide.tile_size is not None
        self.encoder.tile_size = slide.tile_size
        [embedding] = self.encoder(slide.tiles, slide.coords)
        return embedding[0]  # type: ignore[no-any-return]


def saved(model: SlideModel, **facts: Any) -> dict[str, Any]:
    """Return the content of a file of a trained model, from which `load_slide_encoder` reads the encoder.

    The size of tiles is not stored: each slide's own file has it.
    """
    parts = {"model": model.encoder, "head": model.head}
    content: dict[str, Any] = {
        part: {name: weight.detach().cpu() for name, weight in module.state_dict().items()} for part, module in parts.items()
    }
    content |= asdict(model.encoder.config) | facts
    del content["tile_size"]
    return content


@dataclass(frozen=True)
class SlideHead:
    """The linear head of a file that `saved` describes. `classes`: their names; none of survival."""

    weight: Tensor
    bias: Tensor
    classes: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what `predict` returns: a probability of each class, or the risk, a logarithm of a relative hazard."""
        return self.classes or ("risk",)

    def predict(self, embedding: Tensor) -> list[float]:
        """Return the numbers of `columns` for an embedding `(embed_dim,)`."""
        scores = torch.nn.functional.linear(embedding.to(self.weight), self.weight, self.bias)
        return (scores.softmax(0) if self.classes else scores).tolist()


def load_head(path: Path) -> SlideHead:
    """Read the head of a trained model. Raises OSError, or ValueError for a file without one."""
    content = load_tensors(path, mapped=True)
    head, classes = (content.get(name) if isinstance(content, dict) else None for name in ("head", "classes"))
    if not isinstance(head, dict) or not {"weight", "bias"} <= set(head) or not isinstance(classes, list):
        raise ValueError(f"checkpoint {path} has no head; a model.pt that `dilkit finetune-slide` wrote is needed")
    return SlideHead(head["weight"], head["bias"], tuple(map(str, classes)))


def first_encoder(
    config: SlideEncoderConfig,
    found: Checkpoint | None = None,
    *,
    seed: int = 0,
    activation_checkpointing: bool = True,
    backend: str | Sequence[str] | None = None,
    device: str = "cpu",
) -> SlideEncoder:
    """Return an encoder of `config` with the weights of a checkpoint, or with random weights drawn from `seed`.

    Raises ValueError for weights that do not fit.
    """
    with seeded(seed, torch.device(device)):
        encoder = SlideEncoder(config, activation_checkpointing=activation_checkpointing, backend=backend, device=device)
    if found is not None:
        load_weights(found, encoder, f"checkpoint {found.file}", f"arch={known_as(config)!r}")
    return encoder


def config_for(
    slides: Sequence[SlideFile], arch: str | None = None, found: Checkpoint | None = None, **changes: Any
) -> SlideEncoderConfig:
    """Return the configuration of `arch` with `changes` that are not None; `in_chans` defaults to the width of the tiles.

    The mean of the tiles is pooled, unless `changes` or the checkpoint asks for the class token. Raises ValueError for changes
    that contradict the checkpoint.
    """
    wanted = {name: value for name, value in changes.items() if value is not None}
    base = config_of(found, arch, {})
    if found is None:
        return replace(base, **{"in_chans": slides[0].width, "global_pool": True, **wanted})
    if differing := [f"{name}={wanted[name]}" for name in SIZES if wanted.get(name, getattr(base, name)) != getattr(base, name)]:
        raise ValueError(f"{', '.join(differing)}: {found.file} is of {known_as(base)!r}, which has other sizes; leave them out")
    return settled(found, replace(base, global_pool=True), wanted)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block torch's random numbers on the CPU and on `device` begin with `seed`; afterwards they go on as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield
