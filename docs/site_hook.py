"""A hook of the site's builder: shows it the package as it is installed, and adds the lessons as notebooks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

from dilkit.tools.site.lessons import lessons, notebook

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


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """A lesson ends with a link to itself as a notebook."""
    name = Path(page.file.src_uri)
    link = f'<p><a href="{name.stem}.ipynb" download>This lesson as a notebook</a></p>'
    return html + link if name.parent == Path("lessons") and name.stem != "index" else html


def on_post_build(config: Any) -> None:
    """Notebooks lie beside the pages, with the pictures where the pages have them."""
    for page in lessons(ROOT):
        Path(config.site_dir, "lessons", f"{page.stem}.ipynb").write_text(notebook(page))
