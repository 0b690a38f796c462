"""The lessons of docs/lessons: run from top to bottom, their pictures drawn, and made into notebooks.

python -m dilkit.tools.site.lessons [NAME ...]    run them, and put the pictures that they draw into docs/images/lessons
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

LESSONS, PICTURES = Path("docs", "lessons"), Path("docs", "images", "lessons")
_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def lessons(root: Path) -> list[Path]:
    """Return the pages, without their first one."""
    return sorted(page for page in (root / LESSONS).glob("*.md") if page.stem != "index")


def programs(page: Path) -> list[str]:
    """Return the blocks of a page's program."""
    return _PROGRAM.findall(page.read_text())


def run(page: Path, folder: Path) -> list[Path]:
    """Run the program of a page in `folder`; returns the pictures that it drew there."""
    names: dict[str, object] = {"__name__": "__main__"}
    with _working_in(folder):
        for i, block in enumerate(programs(page)):
            exec(compile(block, f"{page.name}, block {i + 1}", "exec", dont_inherit=True), names)
    return sorted(folder.glob("*.png"))


def notebook(page: Path) -> str:
    """Return the page as a notebook of Jupyter, in JSON. Raises ImportError without jupytext."""
    import jupytext

    text: str = jupytext.writes(jupytext.reads(page.read_text(), fmt="md"), fmt="ipynb")
    return text


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(names: list[str]) -> int:
    """Draw the pictures of these lessons, or of all."""
    pages = {page.stem: page for page in lessons(Path.cwd())}
    if unknown := [name for name in names if name not in pages]:
        print(f"no lesson {', '.join(unknown)}; there are {', '.join(pages)}", file=sys.stderr)
        return 2
    Path(PICTURES).mkdir(parents=True, exist_ok=True)
    for name in tqdm(names or list(pages), unit="lesson"):
        with tempfile.TemporaryDirectory() as folder:
            for picture in run(pages[name], Path(folder)):
                shutil.copy(picture, PICTURES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
