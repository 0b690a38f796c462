"""`load_slide_encoder`: a slide encoder of a published architecture, with the weights of a checkpoint."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilkit.checks import one_of
from dilkit.files import check_regular
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.hub import local_file

MOST_BYTES = 2**63
WIDTHS = "patch_embed.proj.weight"
"""Its shape, (embed_dim, in_chans), tells the published architectures apart."""
UNTRAINED = (
    "global_pool is not given: the class token is pooled, which GigaPath's pretraining did not train; "
    "global_pool=True takes the mean of the tiles, global_pool=False suits weights that were tuned with the class token"
)


def load_slide_encoder(
    checkpoint: str | Path | None = None,
    arch: str = "gigapath_slide_enc12l768d",
    *,
    ngrids: int = 1000,
    tile_size: int = 256,
    segment_lengths: Sequence[int] | None = None,
    tail: str = "zeros",
    global_pool: bool | None = None,
    activation_checkpointing: bool = False,
    backend: str | Sequence[str] | None = None,
    comm: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SlideEncoder:
    """GigaPath's slide encoder, in eval mode; it needs neither flash-attn nor GigaPath's own code.

    - `checkpoint`: a file `{"model": weights}` such as the published `slide_encoder.pth`, or of the weights alone; without it
      they are random. Only tensors and plain values are read from it, no code. `"hf_hub:prov-gigapath/prov-gigapath"` is the
      published file, which huggingface_hub downloads to `~/.cache`.
    - `arch`: one of `dilkit.integrations.gigapath.ARCHITECTURES`.
    - `ngrids`, `tile_size`, `tail`: those of `SlideEncoderConfig`.
    - `global_pool`: that of `SlideEncoderConfig`, False by default. GigaPath's pretraining did not train the class token, which
      is pooled then: of a checkpoint, without a word about it, that is warned of.
    - `segment_lengths`: by default the architecture's, (1024, 5792, 32768, 185363, 1048576), whatever `tile_size` is.
    - `activation_checkpointing`, `backend`, `comm`: those of `SlideEncoder`.
    - `device`, `dtype`: of the parameters.

    Raises OSError for a file that cannot be read or downloaded, ImportError for one on the hub where huggingface_hub is missing,
    ValueError for one that holds other weights: it names the architecture that they fit, or lists all names that are missing,
    not known, of another shape or of integers.

        >>> import torch
        >>> from dilkit.integrations.gigapath import load_slide_encoder
        >>> model = load_slide_encoder(device="meta")  # sizes without numbers; else the name of the checkpoint comes first
        >>> sum(weight.numel() for weight in model.parameters())
        86330880
    """
    one_of("arch", arch, tuple(ARCHITECTURES))
    known = ARCHITECTURES[arch]
    lengths = known.segment_lengths if segment_lengths is None else tuple(segment_lengths)
    sizes: dict[str, Any] = dict(ngrids=ngrids, tile_size=tile_size, segment_lengths=lengths, tail=tail)
    config = replace(known, **sizes, global_pool=known.global_pool if global_pool is None else global_pool)
    weights = None if checkpoint is None else read_weights(local_file(checkpoint))
    options: dict[str, Any] = dict(backend=backend, comm=comm, device=device, dtype=dtype)
    model = SlideEncoder(config, activation_checkpointing=activation_checkpointing, **options).eval()
    if weights is not None:
        check_weights(weights, model, f"checkpoint {checkpoint}", f"arch={arch!r}")
        model.load_state_dict(weights)
        if global_pool is None and not model.global_pool:
            warnings.warn(UNTRAINED, stacklevel=2)
    return model


def load_tensors(path: Path) -> Any:
    """What a file of `torch.save` holds, tensors and plain values only. Raises OSError, or ValueError for any other file."""
    check_regular(path, path.stat(), MOST_BYTES)
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
    """What is wrong with a file, in words that do not ask anybody to run code from it, as torch's do."""
    with path.open("rb") as file:
        begin = file.read(4)
    if not begin.startswith((b"PK\x03\x04", b"\x80")):  # an archive, or pickles of older versions
        return "it begins as other files do" if begin else "it is empty"
    if "GLOBAL" in str(error) or begin.startswith(b"\x80"):
        return "it is damaged, or holds objects beside tensors and plain values, and to load these could run code"
    return "it is damaged, or cut off"


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights that a checkpoint holds, by name. Raises OSError, or ValueError for any other file."""
    content = load_tensors(path)
    weights = content.get("model", content) if isinstance(content, Mapping) else content
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f'checkpoint {path} holds no weights; a file {{"model": {{name: tensor}}}} is needed')
    return dict(weights)


def check_weights(weights: Mapping[str, Tensor], model: SlideEncoder, what: str, arch: str) -> None:
    """Raise ValueError unless `weights` are all that `model` needs.

    `what` names them, and `arch` is the architecture, for the error: `arch='gigapath_slide_enc12l768d'`.
    """
    expected = model.state_dict()
    lists = _differences(weights, expected)
    if not any(lists.values()):
        return
    if (fitting := _fitting(weights)) is not None and lists["of another shape"]:
        own, others = (tuple(given[WIDTHS].shape) for given in (weights, expected))
        raise ValueError(
            f"{what} does not fit {arch}: {WIDTHS} is {own} in it and {others} in the model, (embed_dim, in_chans); it fits "
            f"{arch.partition('=')[0]}={fitting!r} with in_chans={ARCHITECTURES[fitting].in_chans}"
        )
    raise ValueError(
        f"{what} does not fit {arch}: "
        + "; ".join(f"{len(names)} {kind}: {', '.join(names)}" for kind, names in lists.items() if names)
    )


def _fitting(weights: Mapping[str, Tensor]) -> str | None:
    """The architecture that has weights of these names and shapes."""
    for name, config in ARCHITECTURES.items():
        if not any(_differences(weights, SlideEncoder(config, device="meta").state_dict()).values()):
            return name
    return None


def _differences(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The names in which weights differ from those expected, by how they differ."""
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
