"""A hook of the site's builder: shows it the package as it is installed, which the folders of a checkout are not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parent.parent
PLACES = {"dilkit": "dilkit", "backends": "dilkit/backends", "comm": "dilkit/comm"}
_laid_out = tempfile.TemporaryDirectory(prefix="dilkit-site-")
"""It goes when the builder ends."""


@event_priority(100)  # before the plugin that reads them
def on_config(config: Any) -> Any:
    """Have signatures and docstrings read from a folder in which `dilkit.comm` lies within `dilkit`."""
    for source, place in PLACES.items():
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.c")
        shutil.copytree(ROOT / source, Path(_laid_out.name, place), ignore=ignored, dirs_exist_ok=True)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_laid_out.name]
    return config
