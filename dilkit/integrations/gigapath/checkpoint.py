"""`load_slide_encoder`: a slide encoder of a published architecture, with the weights of a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit.checks import one_of
from dilkit.files import check_regular
from dilkit.integrations.gigapath.config import ARCHITECTURES, SIZES, SlideEncoderConfig, known_as
from dilkit.integrations.gigapath.encoder import SlideEncoder

DEFAULT = next(iter(ARCHITECTURES))
MOST_BYTES = 2**63
WIDTHS = "patch_embed.proj.weight"
"""Its shape, (embed_dim, in_chans), tells the published architectures apart."""
UNTRAINED = (
    "the class token is pooled, which GigaPath's pretraining did not train; global_pool=True takes the mean of the tiles, "
    "global_pool=False suits weights that were tuned with the class token"
)
TRAINED = (*SIZES, "segment_lengths", "dilation_rates", "tail", "global_pool")
"""Fields of `SlideEncoderConfig` that weights are trained with: another value gives other embeddings, without an error."""
MOST_NAMES = 5


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file, by name, the fields of `SlideEncoderConfig` stored beside them, and whose features they take."""

    file: str
    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    tile_encoder: str | None = None


def load_slide_encoder(
    checkpoint: str | Path | None = None,
    arch: str | None = None,
    *,
    ngrids: int | None = None,
    tile_size: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    tail: str | None = None,
    global_pool: bool | None = None,
    activation_checkpointing: bool = False,
    backend: str | Sequence[str] | None = None,
    comm: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SlideEncoder:
    """Load GigaPath's slide encoder, in eval mode; it needs neither flash-attn nor GigaPath's own code.

    - `checkpoint`: a file `{"model": weights}` such as the published `slide_encoder.pth`, or of the weights alone; without it
      they are random. Only tensors and plain values are read from it, no code. `"hf_hub:prov-gigapath/prov-gigapath"` is the
      published file, which huggingface_hub downloads to `~/.cache`.
    - `arch`: one of `dilkit.integrations.gigapath.ARCHITECTURES`. By default the sizes that the checkpoint stores, else those of
      `"gigapath_slide_enc12l768d"`.
    - `ngrids`, `tile_size`, `segment_lengths`, `tail`, `global_pool`: those of `SlideEncoderConfig`. By default the
      checkpoint's, as `dilkit finetune-slide` stores them in `model.pt`, else the architecture's. GigaPath's pretraining did not
      train the class token, which is pooled by default: a warning says so, unless the argument or the checkpoint does.
    - `activation_checkpointing`, `backend`, `comm`: those of `SlideEncoder`.
    - `device`, `dtype`: of the parameters.

    Raises OSError for a file that cannot be read or downloaded, ImportError for one on the hub where huggingface_hub is missing,
    ValueError for other weights, and for an argument that contradicts what the checkpoint stores.

        >>> import torch
        >>> from dilkit.integrations.gigapath import load_slide_encoder
        >>> model = load_slide_encoder(device="meta")  # sizes without numbers; else the name of the checkpoint comes first
        >>> sum(weight.numel() for weight in model.parameters())
        86330880
    """
    stored = None if checkpoint is None else read_checkpoint(local_file(checkpoint))
    lengths = None if segment_lengths is None else tuple(segment_lengths)
    changes = dict(ngrids=ngrids, tile_size=tile_size, segment_lengths=lengths, tail=tail, global_pool=global_pool)
    config = config_of(stored, arch, changes)
    options: dict[str, Any] = dict(backend=backend, comm=comm, device=device, dtype=dtype)
    model = SlideEncoder(config, activation_checkpointing=activation_checkpointing, **options).eval()
    if stored is not None:
        load_weights(stored, model, f"checkpoint {checkpoint}", f"arch={known_as(config)!r}")
        if global_pool is None and is_pooling_open(stored, config):
            warnings.warn(f"global_pool is not given: {UNTRAINED}", stacklevel=2)
    return model


def config_of(found: Checkpoint | None, arch: str | None, given: Mapping[str, Any]) -> SlideEncoderConfig:
    """Return the configuration of `given`, else the checkpoint, else `arch`. Raises ValueError where they contradict."""
    name = DEFAULT if arch is None else arch
    one_of("arch", name, tuple(ARCHITECTURES))
    base = ARCHITECTURES[name]
    sizes = {} if arch is None else {name: getattr(base, name) for name in SIZES}
    return settled(found, base, {**sizes, **given})


def settled(found: Checkpoint | None, base: SlideEncoderConfig, given: Mapping[str, Any]) -> SlideEncoderConfig:
    """Return `base` changed by the checkpoint's settings and by `given`. Raises ValueError where these two contradict."""
    stored = {} if found is None else found.settings
    changes = {name: value for name, value in given.items() if value is not None}
    other = [name for name in TRAINED if name in stored and name in changes and stored[name] != changes[name]]
    if found is not None and other:
        asked_for, trained = (", ".join(f"{name}={values[name]!r}" for name in other) for values in (changes, stored))
        raise ValueError(
            f"{asked_for} contradicts checkpoint {found.file}, whose weights were trained with {trained}; leave it out"
        )
    return replace(base, **{**stored, **changes})


def is_pooling_open(found: Checkpoint, config: SlideEncoderConfig) -> bool:
    """True if the class token is pooled and the checkpoint does not ask for it: pretraining did not train that token."""
    return "global_pool" not in found.settings and not config.global_pool


def needed_tile_encoder(found: Checkpoint | None, given: str | None) -> str:
    """Return the tile encoder of the weights, or a part of its name. Raises ValueError if `given` is no part of it."""
    stored = None if found is None else found.tile_encoder
    if found is not None and stored and given and given.lower() not in stored.lower():
        raise ValueError(f"tile encoder {given!r}: checkpoint {found.file} was trained on features of {stored!r}; leave it out")
    return given or stored or "gigapath"


def check_tile_encoder(named: str | None, needed: str) -> None:
    """Raise ValueError where a file names the tile encoder of its features, and `needed` is no part of that name."""
    if named is not None and needed.lower() not in named.lower():
        raise ValueError(
            f"features are of {named!r}, not of {needed!r}, as the file says; --tile-encoder {named} "
            "if the checkpoint was trained on them"
        )


def load_tensors(path: Path, mapped: bool = False) -> Any:
    """Read tensors and plain values of `torch.save`, `mapped` where the format allows it. Raises OSError or ValueError."""
    check_regular(path, path.stat(), MOST_BYTES)
    if mapped:
        with contextlib.suppress(Exception):  # of an older format, or damaged, as is said below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    try:
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals([argparse.Namespace]),
        ):  # training arguments beside weights
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # what does not fit is refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is no file of tensors, as torch.save writes them: {_why_not_loaded(path, error)}") from None


def _why_not_loaded(path: Path, error: Exception) -> str:
    """Return why a file cannot be read. Torch's own message would suggest running code from it."""
    with path.open("rb") as file:
        begin = file.read(4)
    if not begin.startswith((b"PK\x03\x04", b"\x80")):  # an archive, or pickles of older versions
        return "it begins as other files do" if begin else "it is empty"
    if "GLOBAL" in str(error) or begin.startswith(b"\x80"):
        return "it is damaged, or holds objects beside tensors and plain values, and to load these could run code"
    return "it is damaged, or cut off"


def read_checkpoint(path: Path, mapped: bool = False) -> Checkpoint:
    """Return the checkpoint in a file, `mapped` as in `load_tensors`. Raises OSError, or ValueError for any other content."""
    content = load_tensors(path, mapped)
    weights = content.get("model", content) if isinstance(content, Mapping) else content
    if not isinstance(weights, Mapping) or not all(is_dense(value) for value in weights.values()):
        raise ValueError(f'checkpoint {path} holds no weights; a file {{"model": {{name: dense tensor}}}} is needed')
    names = [one.name for one in fields(SlideEncoderConfig)] if "model" in content else []
    settings = {name: content[name] for name in names if name in content}
    try:
        config = replace(SlideEncoderConfig(), **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint {path} stores settings that no encoder has: {error}") from None
    encoder = content.get("tile_encoder") if names else None
    checked = {name: getattr(config, name) for name in settings}
    return Checkpoint(str(path), dict(weights), checked, encoder if isinstance(encoder, str) else None)


def is_dense(value: Any) -> bool:
    """True for a tensor whose numbers can be used as they are: not sparse, quantised, nested or without memory."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
    )


def load_weights(checkpoint: Checkpoint, model: SlideEncoder, what: str, arch: str) -> None:
    """Load the weights. Raises ValueError, naming them by `what` and `arch`, unless they are all that `model` needs."""
    weights, expected = checkpoint.weights, model.state_dict()
    lists = _differences(weights, expected)
    if not any(lists.values()):
        model.load_state_dict(weights)
        return
    blanks = ((name, SlideEncoder(config, device="meta").state_dict()) for name, config in ARCHITECTURES.items())
    fitting = next((name for name, blank in blanks if not any(_differences(weights, blank).values())), None)
    if fitting is not None and lists["of another shape"]:
        stored, needed = (tuple(tensors[WIDTHS].shape) for tensors in (weights, expected))
        raise ValueError(
            f"{what} does not fit {arch}: {WIDTHS} is {stored} in it and {needed} in the model, (embed_dim, in_chans); it fits "
            f"{arch.partition('=')[0]}={fitting!r} with in_chans={ARCHITECTURES[fitting].in_chans}"
        )
    raise ValueError(
        f"{what} does not fit {arch}: "
        + "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:MOST_NAMES])}{', ...' if len(names) > MOST_NAMES else ''}"
            for kind, names in lists.items()
            if names
        )
    )


def _differences(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, list[str]]:
    both = [name for name in expected if name in weights]
    return {
        "missing": [name for name in expected if name not in weights],
        "not known": [str(name) for name in weights if name not in expected],
        "of another shape": [
            f"{name} {tuple(weights[name].shape)} instead of {tuple(expected[name].shape)}"
            for name in both
            if weights[name].shape != expected[name].shape
        ],
        "not of floating point": [name for name in both if not weights[name].is_floating_point()],
    }


HUB = "hf_hub:"
PUBLISHED = f"{HUB}prov-gigapath/prov-gigapath"
FILE = "slide_encoder.pth"
FOLDER = Path("~/.cache")


def local_file(checkpoint: str | Path, folder: str | Path | None = None) -> Path:
    """Return the path `checkpoint`, or `slide_encoder.pth` in `folder` for a name on the hub, downloaded unless it is the same.

    Raises ImportError where huggingface_hub and the file are missing, OSError for no download, FileNotFoundError for no file.
    """
    name = str(checkpoint)
    if not name.startswith(HUB):
        if not name or not Path(name).exists():
            raise FileNotFoundError(f"checkpoint {name!r} does not exist; give the file of the weights, or '{PUBLISHED}'")
        return Path(name)
    repository = name.removeprefix(HUB)
    place = Path(FOLDER if folder is None else folder).expanduser()
    page = f"https://huggingface.co/{repository}"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        if (place / FILE).is_file():
            return place / FILE
        raise ImportError(
            f"{name} needs huggingface_hub, which cannot be imported ({error}): pip install huggingface_hub, or "
            f"download {FILE} from {page} and put it at {place / FILE}"
        ) from None
    try:
        return Path(hf_hub_download(repository, filename=FILE, local_dir=str(place)))
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise OSError(
            f"{name} cannot be downloaded: {said[0].rstrip('.')}; accept the terms at {page} and log in (hf auth login), or "
            f"download {FILE} there and give its path"
        ) from error
