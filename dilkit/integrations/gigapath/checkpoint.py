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

MOST_BYTES = 2**63
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
      they are random. Only tensors and plain values are read from it, no code.
    - `arch`: one of `dilkit.integrations.gigapath.ARCHITECTURES`.
    - `ngrids`, `tile_size`, `tail`: those of `SlideEncoderConfig`.
    - `global_pool`: that of `SlideEncoderConfig`, False by default. GigaPath's pretraining did not train the class token, which
      is pooled then: of a checkpoint, without a word about it, that is warned of.
    - `segment_lengths`: by default the architecture's, (1024, 5792, 32768, 185363, 1048576), whatever `tile_size` is.
    - `activation_checkpointing`, `backend`, `comm`: those of `SlideEncoder`.
    - `device`, `dtype`: of the parameters.

    Raises OSError for a file that cannot be read, ValueError for one that holds other weights: all names that are missing, not
    known, of another shape or of integers are listed.

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
    weights = None if checkpoint is None else _weights(Path(checkpoint))
    options: dict[str, Any] = dict(backend=backend, comm=comm, device=device, dtype=dtype)
    model = SlideEncoder(config, activation_checkpointing=activation_checkpointing, **options).eval()
    if weights is not None:
        _check(weights, model.state_dict(), f"checkpoint {checkpoint} does not fit arch={arch!r}")
        model.load_state_dict(weights)
        if global_pool is None and not model.global_pool:
            warnings.warn(UNTRAINED, stacklevel=2)
    return model


def load_tensors(path: Path) -> Any:
    """What a file of `torch.save` holds, tensors and plain values only. Raises OSError, or ValueError for any other file."""
    check_regular(path, path.stat(), MOST_BYTES)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # training arguments, which lie beside the weights
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ValueError(f"{path} is no file of tensors that torch.load(weights_only=True) reads: {said[0]}") from None


def _weights(path: Path) -> dict[str, Tensor]:
    found = load_tensors(path)
    weights = found.get("model", found) if isinstance(found, Mapping) else found
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f'checkpoint {path} holds no weights; a file {{"model": {{name: tensor}}}} is needed')
    return dict(weights)


def _check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError with all differences in names and shapes."""
    misshapen = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in found and found[name].shape != expected[name].shape
    ]
    lists = {
        "missing": [name for name in expected if name not in found],
        "not known": [str(name) for name in found if name not in expected],
        "of another shape": misshapen,
        "not of floating point": [name for name in expected if name in found and not found[name].is_floating_point()],
    }
    if any(lists.values()):
        raise ValueError(
            f"{what}: " + "; ".join(f"{len(names)} {kind}: {', '.join(names)}" for kind, names in lists.items() if names)
        )
