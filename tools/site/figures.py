"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

import os
import re
from collections import Counter
from pathlib import Path

from dilkit.tools.report import registry
from dilkit.tools.report.markdown import document_markdown, rows_markdown
from dilkit.tools.results.rows import RowsResult

NOTHING = "Nothing has been measured for this version yet."
PAGES = {"costs": "../gpu-costs.md", "ptx": "../gpu-kernels.md"}
"""Pages of results that are not beside them."""
SINGLE = "results/demos.md"
"""The page of results that have none of their own, beside the page of measurements."""
SIDE_BY_SIDE = ("cpu",)
"""Suites that have a file for each machine, shown together."""
ON_GPUS = ("cupy_raw", "triton", "numba_cuda", "sdpa", "flex")
_NAMED = re.compile(rf"(?<![\w:])(?:sdpa:(?:cudnn|flash[34]?|memory-efficient)|{'|'.join(ON_GPUS)})(?![\w:])")
CALLS = {"launch": "every kernel once", "graph": "CUDA graphs", "stream": "side streams", "compile": "compiled code"}
CALLS |= {"ranks": "ranks on one GPU", "second device": "a second GPU", "nccl": "NCCL", "step": "steps of decoding"}
"""Calls, by a part of the names of tests that make them."""


def sentence(folder: Path, name: str) -> str:
    path = folder / f"{name}.json"
    return registry.sentence_of(path) if path.exists() else NOTHING


def front(folder: Path) -> str:
    """Return the figures of the front page: one of a CPU, one of a GPU."""
    return f"- CPU: {sentence(folder, 'lengths')}\n- GPU: {sentence(folder, 'gpu-h200')}"


def summary(folder: Path) -> str:
    """Return a list item for each result in `folder`, with a link to its page, or to its section of the page of single ones."""
    kinds = list(registry.KINDS)
    sections = sorted(_sections(folder).items(), key=lambda section: kinds.index(registry.read(section[1][0]).kind))
    links = {name: _page(folder, name) or f"{SINGLE}#{name}" for name, _ in sections}
    items = []
    for name, paths in sections:
        texts = [registry.sentence_of(path) for path in paths]
        items.append(f"* [{name}]({links[name]}): {texts[0] if len(texts) == 1 else ''}".rstrip())
        items += [f"    * {text}" for text in texts if len(texts) > 1]
    return "\n".join(items) or NOTHING


def _sections(folder: Path) -> dict[str, list[Path]]:
    sections: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        suite = path.stem.partition("-")[0]
        sections.setdefault(suite if suite in SIDE_BY_SIDE else path.stem, []).append(path)
    return sections


def _page(folder: Path, name: str) -> str | None:
    """Return the address of the page of a result, as seen from that of measurements; None where it has none."""
    suite = name.partition("-")[0]
    page = folder / PAGES.get(suite, f"{suite}.md")
    return os.path.relpath(page, folder.parent) if page.exists() else None


def measurements(folder: Path) -> str:
    """Return every result in `folder` that has no page of its own, with a link to its file."""
    parts = []
    for name, (path, *_) in _sections(folder).items():
        if not _page(folder, name):
            document = document_markdown(registry.document_of(path), level=3)
            parts += [f"## {name}", document, f"The file: [{path.name}]({path.name})"]
    return "\n\n".join(parts) or NOTHING


def whole(folder: Path, name: str, level: int = 2) -> str:
    paths = _sections(folder).get(name)
    return document_markdown(registry.document_of(*paths), level=level) if paths else NOTHING


def gpu_counts(folder: Path) -> dict[tuple[str, str], Counter[str]]:
    """Return what the results in `folder` hold of each GPU and backend: checks passed, wrong ones, timed cases, calls by kind."""
    runs: dict[tuple[str, str], Counter[str]] = {}
    for result in map(registry.read, sorted(folder.glob("gpu*.json"))):
        for row in result.rows if isinstance(result, RowsResult) and result.environment.device == "cuda" else ():
            test = str(row.case.get("name")).replace("_", " ")
            for name in {*_NAMED.findall(f"{row.case} {row.who if row.samples or row.verdict == 'wrong' else ''}")}:
                counts = runs.setdefault((result.environment.device_name, name), Counter())
                counts.update({key: int(row.values.get(key, 0)) for key in ("passed", "wrong")}, timed=bool(row.samples))
                counts.update(wrong=row.verdict == "wrong")
                if "wrong" not in row.values:  # no problems of the list
                    counts.update(f"{words} {row.verdict}" for part, words in CALLS.items() if part in test)
    return runs


def gpu_runs(folder: Path) -> str:
    """Return what the results of each GPU in `folder` hold of each backend, and what none of them holds."""
    rows = [("GPU", "backend", "checks of the problem list", "timed", "also right, unless marked")]
    for (gpu, name), n in sorted(gpu_counts(folder).items()):
        if n["timed"] or n["wrong"] or ":" not in name:  # a kernel that torch lacks is right where no call of it is needed
            checks = f"{n['passed']} right, {n['wrong']} wrong" if n["passed"] or n["wrong"] else "-"
            marks = {words: " WRONG" if n[f"{words} failed"] else "" for words in CALLS.values()}
            also = ", ".join(words + mark for words, mark in marks.items() if mark or n[f"{words} measured"])
            rows.append((gpu, f"`{name}`", checks, f"{n['timed']} cases", also or "-"))
    ran, known = str(rows), [*(f"`{name}`" for name in ON_GPUS), *CALLS.values()]
    return f"{rows_markdown(rows)}\n\nWithout a result: {', '.join(x for x in known if x not in ran)}, and every other GPU."


def gpu_suites(folder: Path) -> str:
    paths = sorted(folder.glob("gpu*.json"))
    return "\n\n".join(f"## {path.stem}\n\n{document_markdown(registry.document_of(path), level=3)}" for path in paths)
