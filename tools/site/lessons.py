"""The lessons of docs/lessons: run from top to bottom, their pictures drawn, and made into notebooks."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LESSONS, PICTURES = Path("docs", "lessons"), Path("docs", "images", "lessons")
_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def lessons(root: Path) -> list[Path]:
    """Return the pages, without their first one."""
    return sorted(page for page in (root / LESSONS).glob("*.md") if page.stem != "index")


def programs(page: Path) -> list[str]:
    return _PROGRAM.findall(page.read_text())


def run(page: Path, folder: Path) -> list[Path]:
    """Run the program of a page in `folder`, by another Python; return the pictures that it drew there."""
    subprocess.run([sys.executable, "-"], input="".join(programs(page)), text=True, cwd=folder, check=True)
    return sorted(folder.glob("*.png"))


def notebook(page: Path) -> str:
    """Return the page as a notebook of Jupyter, in JSON. Raises ImportError without jupytext."""
    import jupytext

    text: str = jupytext.writes(jupytext.reads(page.read_text(), fmt="md"), fmt="ipynb")
    return text


if __name__ == "__main__":
    for lesson in lessons(Path()):
        if not sys.argv[1:] or lesson.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as place:
                for picture in run(lesson, Path(place)):
                    shutil.copy(picture, PICTURES)
