"""Writes the generated parts of README.md and docs/, with every GPU assumed and no module missing."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from dilkit.environment import VARIABLES
from dilkit.tools import cli
from dilkit.tools.report import registry
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import write_png
from dilkit.tools.results.file import write_text
from dilkit.tools.site import backends, families, figures, many_ranks, pattern_gallery

BLOCK = re.compile(r"^(<!-- generated: (\S+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
PICTURED = ("lengths", "ring", "orders", "serving", "patterns", "scores", "slides", "demo-llama", "demo-ranks")
"""Results that a page shows a picture of: their first two plots."""
SUITES = ("cpu", "hosts", "orders", "patterns", "ring", "scores", "seeds", "serving", "slides")
"""Suites whose reports are pages."""
COMMANDS = {
    "pattern.png": "draw --seq 64 --heads 4 --segments 16,32,64 --rates 1,2,4 --out",
    "kept.png": "draw --kept --seq 80 --heads 2 --segments 8,32 --rates 1,4 --out",
    "order.png": "order --shape 64x64 --curve hilbert --segments 256 --rates 8 --png",
}
"""Commands that draw a picture into the file that follows."""


def main() -> int:
    """Write the pages and draw the pictures of the checkout in the current folder; return the first exit code but 0."""
    root, images = Path(), Path("docs", "images")
    for path, text in stale_pages(root).items():
        print(f"written: {path}")
        write_text(path, text)
    images.mkdir(parents=True, exist_ok=True)
    for name in PICTURED:
        if (result := root / "docs" / "results" / f"{name}.json").exists():
            write_png(registry.document_of(result).plots[:2], images / f"{name}.png")
    for name, command in COMMANDS.items():
        if code := cli.main([*command.split(), str(images / name)]):
            return code
    pattern_gallery.draw_gallery(images / "gallery.png")
    pattern_gallery.draw_received(images / "received.png")
    many_ranks.draw(images / "many-ranks.png")
    return 0


def stale_pages(root: Path) -> dict[Path, str]:
    """Return the new texts of pages whose generated parts have changed."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "docs" / "results").glob("*.md"))]
    texts = {path: path.read_text() for path in pages}
    fresh = {path: BLOCK.sub(partial(_block, root=root), text) for path, text in texts.items()}
    return {path: text for path, text in fresh.items() if text != texts[path]}


def _block(match: re.Match[str], root: Path) -> str:
    begin, name, end = match.groups()
    return f"{begin}{GENERATORS[name](root).strip()}\n{end}"


def command_help(root: Path) -> str:
    parts = []
    for command in ((), *((name,) for name in cli.COMMANDS)):
        shown = io.StringIO()
        with mock.patch.dict(os.environ, {"COLUMNS": "110", "NO_COLOR": "1"}), contextlib.redirect_stdout(shown):
            cli.main([*command, "--help"])
        title = " ".join(("dilkit", *command))
        parts.append(f"## {title}\n\n```text\n{shown.getvalue().strip()}\n```\n")
    return "\n".join(parts)


def _of_results(make: Callable[..., str], **options: Any) -> Callable[[Path], str]:
    """Return a generator that reads the folder of results alone."""
    return lambda root: make(root / "docs" / "results", **options)


def _drawn(name: str) -> Callable[[Path], str]:
    """Return a generator of the command that draws a picture."""
    return lambda root: f"```console\n$ dilkit {COMMANDS[name]} {name}\n```"


GENERATORS: dict[str, Callable[[Path], str]] = {
    "backends": backends.backend_table,
    "calls": backends.call_table,
    "command-line": command_help,
    "costs": _of_results(figures.whole, name="costs"),
    "environment": lambda root: rows_markdown(
        [("variable", "meaning", "when unset"), *((f"`{v.name}`", v.meaning, v.default) for v in VARIABLES)]
    ),
    "executed": _of_results(figures.sentence, name="ptx"),
    "families": families.family_summary,
    "figures": _of_results(figures.summary),
    "forms": backends.form_table,
    "front": _of_results(figures.front),
    "gallery": pattern_gallery.gallery_calls,
    "kernels": _of_results(figures.whole, name="kernels"),
    "many-ranks": many_ranks.table,
    "measurements": _of_results(figures.measurements),
    "models": families.family_table,
    "on-gpus": _of_results(figures.gpu_runs),
    "picks": backends.pick_table,
    "ptx": _of_results(figures.whole, name="ptx", level=4),
    "status": backends.status_table,
    "suite-gpu": _of_results(figures.gpu_suites),
    **{f"drawn-{name}": _drawn(name) for name in COMMANDS},
    **{f"suite-{name}": _of_results(figures.whole, name=name) for name in SUITES},
}

if __name__ == "__main__":
    sys.exit(main())
