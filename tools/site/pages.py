"""Writes the generated parts of README.md and of docs/ anew: everything between `<!-- generated: NAME -->` and `<!-- end -->`.

    python -m dilkit.tools.site.pages

It runs in the root of a checkout. The pages depend on that alone, not on the machine: every GPU is assumed, no module is missing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import dilkit
from dilkit import comm
from dilkit.selection.preference_table import ON_GPUS
from dilkit.tools import cli
from dilkit.tools.report import registry
from dilkit.tools.report.picture import write_png
from dilkit.tools.results.file import write_text
from dilkit.tools.site import api, backends, counted, figures, history, many_ranks, pattern_gallery, slide_picture

BLOCK = re.compile(r"^(<!-- generated: (\S+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
PICTURED = {
    "lengths": 2,
    "ring": 6,
    "orders": 6,
    "seeds": 6,
    "serving": 4,
    "patterns": 5,
    "scores": 3,
    "slides": 4,
    "costs": 6,
    "demo-llama": 2,
    "demo-ranks": 3,
}
"""Results that a page shows a picture of, and the number of plots in each."""
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
    for name, most in PICTURED.items():
        if (result := root / "docs" / "results" / f"{name}.json").exists():
            write_png(registry.document_of(result).plots[:most], images / f"{name}.png")
    history.draw(root, images / "history.png")
    for name, command in COMMANDS.items():
        if code := cli.main([*command.split(), str(images / name)]):
            return code
    slide_picture.draw_slide(images / "slide.png")
    pattern_gallery.draw_gallery(images / "gallery.png")
    many_ranks.draw(images / "many-ranks.png")
    return 0


def stale_pages(root: Path) -> dict[Path, str]:
    """Return the new texts of pages whose generated parts have changed. Raises ValueError for a block of an unknown name."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "docs" / "results").glob("*.md"))]
    if not pages[0].is_file():
        raise ValueError(f"root={root}: no README.md there; give the folder of a checkout")
    texts = {path: path.read_text() for path in pages}
    fresh = {path: BLOCK.sub(partial(_block, page=path, root=root), text) for path, text in texts.items()}
    return {path: text for path, text in fresh.items() if text != texts[path]}


def _block(match: re.Match[str], page: Path, root: Path) -> str:
    begin, name, end = match.groups()
    if name not in GENERATORS:
        raise ValueError(f"{page}: nothing generates {name!r}; known: {', '.join(GENERATORS)}")
    return f"{begin}{GENERATORS[name](root).strip()}\n{end}"


def _of_results(make: Callable[[Path], str]) -> Callable[[Path], str]:
    """Return a generator that reads the folder of results alone."""
    return lambda root: make(root / "docs" / "results")


def _suite(name: str, alt: str = "", images: str = "../images", level: int = 2) -> Callable[[Path], str]:
    """Return the generator of a result's whole report, below its picture if that has the text `alt`."""
    picture = f"![{alt}]({images}/{name}.png)" if alt else ""
    return _of_results(partial(figures.whole, name=name, level=level, picture=picture))


GENERATORS: dict[str, Callable[[Path], str]] = {
    "api": api.grouped_reference,
    "api-nn": partial(api.reference, package=dilkit.nn),
    "api-comm": partial(api.reference, package=comm),
    "backends": backends.backend_table,
    "calls": api.call_table,
    "composition": backends.composition_table,
    "forms": api.form_table,
    "command-line": api.command_help,
    "costs": _suite(
        "costs", "Times below which the CUDA kernels and FlashAttention-2 on views cannot be, for six GPUs", "images"
    ),
    "environment": api.environment_table,
    "executed": figures.executed,
    "families": counted.family_table,
    "history": history.history,
    "figures": _of_results(figures.summary),
    "gallery": pattern_gallery.gallery_table,
    "kept": counted.cache_table,
    "kinds": backends.kind_table,
    "kernels": _suite("kernels"),
    "locality": counted.curve_table,
    "many-ranks": many_ranks.table,
    "many-ranks-assumptions": many_ranks.assumptions,
    "measurements": _of_results(figures.measurements),
    "on-gpus": lambda root: "\n\n".join(ON_GPUS),
    "peers": api.peer_table,
    "picks": backends.pick_table,
    "ptx": _suite("ptx", level=4),
    "status": figures.status,
    "support": backends.support_table,
    "suite-gpu": _of_results(figures.gpu_suites),
    "suite-cpu": _suite("cpu"),
    "suite-hosts": _suite("hosts"),
    "suite-orders": _suite("orders", "Time a point, speed-ups over other packages, distances to the nearest kept key"),
    "suite-patterns": _suite(
        "patterns", "Time and memory of windows, mixes of kinds and BigBird beside what else computes them; rates"
    ),
    "suite-ring": _suite("ring"),
    "suite-scores": _suite("scores", "Time of biases of each kind; time and memory beside torch with a matrix and eager torch"),
    "suite-seeds": _suite("seeds"),
    "suite-serving": _suite("serving", "Time of a step of decoding, memory of a cache; time of packed sequences and of prefill"),
    "suite-slides": _suite("slides", "Time and peak memory of the slide encoder, both ways; the rate of attention by head_dim"),
}

if __name__ == "__main__":
    sys.exit(main())
