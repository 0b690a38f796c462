"""Checkpoints by name: `hf_hub:prov-gigapath/prov-gigapath` is that repository's `slide_encoder.pth`."""

from __future__ import annotations

from pathlib import Path

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
