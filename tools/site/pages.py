"""Writes the generated parts of README.md and of docs/ anew: everything between `<!-- generated: NAME -->` and `<!-- end -->`.

    python -m dilkit.tools.site.pages

It runs in the root of a checkout. What is written depends on that alone, not on what the machine has: every GPU is assumed, no
module is missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import dilkit
from dilkit import comm
from dilkit.backend import Limits
from dilkit.environment import VARIABLES
from dilkit.problem import DTYPES
from dilkit.tools import cli
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.report import registry
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import write_png
from dilkit.tools.results.file import write_text
from dilkit.tools.site import figures, history, many_ranks
from dilkit.tools.site.api import composition_table, grouped_reference, reference
from dilkit.tools.site.decoding_figures import kept_table
from dilkit.tools.site.model_families import family_table
from dilkit.tools.site.order_figures import locality_table
from dilkit.tools.site.pattern_gallery import draw_gallery, gallery_table
from dilkit.tools.site.picks import kind_table, own_backends, pick_table
from dilkit.tools.site.slide_picture import draw_slide
from dilkit.tools.site.status import executed, on_gpus, status
from dilkit.tools.site.support import call_table, form_table, support_table

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
"""Results that a page shows a picture of: how many plots of each."""
_DRAWN = ("draw", "--seq", "64", "--heads", "4", "--segments", "16,32,64", "--rates", "1,2,4")
PICTURES = {
    "pattern.png": (*_DRAWN, "--out"),
    "causal.png": (*_DRAWN, "--causal", "--out"),
    "kept.png": ("draw", "--kept", "--seq", "80", "--heads", "2", "--segments", "8,32", "--rates", "1,4", "--out"),
    "order.png": ("order", "--shape", "64x64", "--curve", "hilbert", "--segments", "256", "--rates", "8", "--png"),
}
"""The commands that draw them, the file's name left out."""


def main() -> int:
    """Write the pages and draw the pictures of the checkout in the current folder."""
    root = Path()
    for path, text in stale_pages(root).items():
        print(f"written: {path}")
        write_text(path, text)
    draw_results(root / "docs" / "results", root / "docs" / "images")
    history.draw(root, root / "docs" / "images" / "history.png")
    return draw(root / "docs" / "images")


def stale_pages(root: Path) -> dict[Path, str]:
    """The pages whose text differs from what they should be, with that text. Raises ValueError for a block of an unknown name."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "docs" / "results").glob("*.md"))]
    if not pages[0].is_file():
        raise ValueError(f"root={root}: no README.md there; give the folder of a checkout")
    texts = {path: path.read_text() for path in pages}
    fresh = {path: BLOCK.sub(partial(_block, page=path, root=root), text) for path, text in texts.items()}
    return {path: text for path, text in fresh.items() if text != texts[path]}


def draw(folder: Path) -> int:
    """Draw the pictures of the pages into `folder`; the exit code of the first command that fails, else 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in PICTURES.items():
        if code := cli.main([*command, str(folder / name)]):
            return code
    draw_slide(folder / "slide.png")
    draw_gallery(folder / "gallery.png")
    many_ranks.draw(folder / "many-ranks.png")
    return 0


def draw_results(results_folder: Path, folder: Path) -> None:
    """Draw the pictures of the results whose pages show one into `folder`, anew from their files."""
    for name, most in PICTURED.items():
        if (results_folder / f"{name}.json").exists():
            write_png(registry.document_of(results_folder / f"{name}.json").plots[:most], folder / f"{name}.png")


def _block(match: re.Match[str], page: Path, root: Path) -> str:
    begin, name, end = match.groups()
    if name not in GENERATORS:
        raise ValueError(f"{page}: nothing generates {name!r}; known: {', '.join(GENERATORS)}")
    return f"{begin}{GENERATORS[name](root).strip()}\n{end}"


def backend_table(root: Path) -> str:
    """One row a backend: what it is and what it can do."""
    rows = [("backend", "what it is", "needs", "devices", "dtypes", "not supported")]
    for b in own_backends():
        limits = b.limits
        devices = "any" if limits.devices is None else ", ".join(sorted(limits.devices))
        dtypes = "all four" if limits.dtypes == set(DTYPES) else ", ".join(d for d in DTYPES if d in limits.dtypes)
        rows.append((f"`{b.name}`", b.summary, ", ".join(b.requires), devices, dtypes, ", ".join(_gaps(limits)) or "-"))
    return rows_markdown(rows)


def _gaps(limits: Limits) -> list[str]:
    """What a backend's limits leave out, beside devices and dtypes."""
    flags = ("causal", "key_padding_mask", "gradients", "varlen", "kv_cache", "dropout", "grouped_heads", "head_ranges")
    gaps = [flag.replace("_", " ") for flag in flags if not getattr(limits, flag)]
    everything = Limits()
    for name in ("offsets", "overlaps"):
        gaps += [f"{name.removesuffix('s')} {value!r}" for value in sorted(getattr(everything, name) - getattr(limits, name))]
    if limits.min_capability:
        gaps.append("capability below {}.{}".format(*limits.min_capability))
    if limits.max_capability:
        gaps.append("capability above {}.{}".format(*limits.max_capability))
    if limits.max_head_dim:
        gaps.append(f"head_dim above {limits.max_head_dim}")
    if limits.head_dim_multiple > 1:
        gaps.append(f"head_dim not a multiple of {limits.head_dim_multiple}")
    return gaps


def peer_table(root: Path) -> str:
    """One row a peer of `dilkit bench`: what it is and what it computes."""
    rows = [("peer", "what it is", "what it computes")]
    rows += [(f"`{p.name}`", p.summary, p.computes) for p in BASELINES.values()]
    return rows_markdown(rows)


def environment_table(root: Path) -> str:
    """One row an environment variable."""
    return rows_markdown([("variable", "meaning", "when unset"), *((f"`{v.name}`", v.meaning, v.default) for v in VARIABLES)])


def command_help(root: Path) -> str:
    """The help texts of all commands."""
    parts = []
    for command in ((), *((name,) for name in cli.COMMANDS)):
        shown = io.StringIO()
        with mock.patch.dict(os.environ, {"COLUMNS": "110", "NO_COLOR": "1"}), contextlib.redirect_stdout(shown):
            cli.main([*command, "--help"])
        title = " ".join(("dilkit", *command))
        parts.append(f"## {title}\n\n```text\n{shown.getvalue().strip()}\n```\n")
    return "\n".join(parts)


def order_suite(root: Path) -> str:
    """The report of the suite of token orders."""
    return _pictured(root, "orders", "Time a point, speed-ups over other packages, distances to the nearest kept key")


def serving_suite(root: Path) -> str:
    """The report of the suite of serving."""
    return _pictured(root, "serving", "Time of a step of decoding, memory of a cache; time of packed sequences and of prefill")


def pattern_suite(root: Path) -> str:
    """The report of the suite of patterns."""
    return _pictured(
        root, "patterns", "Time and memory of windows, mixes of kinds and BigBird beside what else computes them; rates"
    )


def score_suite(root: Path) -> str:
    """The report of the suite of scores."""
    return _pictured(root, "scores", "Time of biases of each kind; time and memory beside torch with a matrix and eager torch")


def slide_suite(root: Path) -> str:
    """The report of the suite of slides."""
    return _pictured(root, "slides", "Time and peak memory of the slide encoder, both ways; the rate of attention by head_dim")


def kernel_costs(root: Path) -> str:
    """What the CUDA kernels issue, and what follows from it."""
    words = "Times below which the CUDA kernels and FlashAttention-2 on views cannot be, for six GPUs"
    return _pictured(root, "costs", words, images="images")


def _pictured(root: Path, name: str, words: str, images: str = "../images") -> str:
    """The report of a suite, with its picture where there is a result to draw."""
    folder = root / "docs" / "results"
    picture = f"![{words}]({images}/{name}.png)\n\n"
    return picture * (folder / f"{name}.json").exists() + figures.whole(folder, name)


GENERATORS: dict[str, Callable[[Path], str]] = {
    "api": grouped_reference,
    "api-nn": partial(reference, package=dilkit.nn),
    "api-comm": partial(reference, package=comm),
    "backends": backend_table,
    "calls": call_table,
    "composition": composition_table,
    "forms": form_table,
    "command-line": command_help,
    "costs": kernel_costs,
    "environment": environment_table,
    "executed": executed,
    "families": family_table,
    "history": history.history,
    "figures": lambda root: figures.summary(root / "docs" / "results"),
    "gallery": gallery_table,
    "kept": kept_table,
    "kinds": kind_table,
    "kernels": lambda root: figures.whole(root / "docs" / "results", "kernels"),
    "locality": locality_table,
    "many-ranks": many_ranks.table,
    "many-ranks-assumptions": many_ranks.assumptions,
    "measurements": lambda root: figures.measurements(root / "docs" / "results"),
    "on-gpus": on_gpus,
    "peers": peer_table,
    "picks": pick_table,
    "ptx": lambda root: figures.whole(root / "docs" / "results", "ptx", level=4),
    "status": status,
    "support": lambda root: support_table(own_backends()),
    "suite-gpu": lambda root: figures.gpu_suites(root / "docs" / "results"),
    "suite-cpu": lambda root: figures.whole(root / "docs" / "results", "cpu"),
    "suite-hosts": lambda root: figures.whole(root / "docs" / "results", "hosts"),
    "suite-orders": order_suite,
    "suite-patterns": pattern_suite,
    "suite-ring": lambda root: figures.whole(root / "docs" / "results", "ring"),
    "suite-scores": score_suite,
    "suite-seeds": lambda root: figures.whole(root / "docs" / "results", "seeds"),
    "suite-serving": serving_suite,
    "suite-slides": slide_suite,
}

if __name__ == "__main__":
    sys.exit(main())
