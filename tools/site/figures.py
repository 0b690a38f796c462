"""The measured figures of README.md and docs/: read out of the result files in docs/results, never written by hand."""

from __future__ import annotations

import os
from pathlib import Path

from dilkit.selection.preference_table import ON_GPUS
from dilkit.tools.report import registry
from dilkit.tools.report.markdown import document_markdown, escaped, table_markdown

NOTHING = "Nothing has been measured for this version yet."
MOST_ROWS = 24
"""Rows of a table that stands on docs/measurements.md beside a link to the whole."""
PAGES = {"costs": "../gpu-costs.md", "ptx": "../gpu-kernels.md"}
"""Pages of results that are not beside them."""
SIDE_BY_SIDE = ("cpu",)
"""Suites that have a file for each machine, shown together."""
SYSTEMS = (
    "dilkit is developed and tested on Linux on x86-64. For aarch64 the C kernel ran under an emulator; on macOS and Windows "
    "nothing was run."
)
EXPERIMENTAL = (
    "**Experimental**, as it has not run on what it is made for: every backend on GPUs, but for what an H200 has run; "
    "NCCL and CUDA-aware MPI; ranks on more than one machine; the release workflow. Everything else is held to the "
    "double-precision oracle on CPUs by `make test`."
)
VERSIONS = (
    "**Versions.** Before 1.0 a minor version may change what is public, and the changelog says how. What will be removed warns "
    "for one minor version first. A patch version only fixes faults."
)


def status(root: Path) -> str:
    """Return the state of dilkit: CPUs with figures, GPUs, experiments, versions."""
    results = [registry.read(path) for path in sorted((root / "docs" / "results").glob("*.json"))]
    places, machines = [one.environment for one in results if one.environment.device == "cpu"], set()
    for place in places:
        widest = max((name for name in place.features if name.startswith("avx")), default="no AVX")
        machines.add(f"{place.device_name} ({place.cores} cores, {widest})")
    cpus = f"The figures of these pages were measured on {len(machines)} CPUs: {'; '.join(sorted(machines))}."
    first, *others = ON_GPUS
    return "\n\n".join((f"**CPUs.** {cpus} {SYSTEMS}", f"**GPUs.** {first}", *others, EXPERIMENTAL, VERSIONS))


def executed(root: Path) -> str:
    """Return what has been executed of the kernels for GPUs, without one."""
    path = root / "docs" / "results" / "ptx.json"
    sentence = registry.sentence_of(path) if path.exists() else NOTHING
    link = "[What has been executed](docs/gpu-kernels.md#what-has-been-executed)"
    return f"{sentence} {link} leaves out machine code, and `triton` in half precision from 9.0 on."


def summary(folder: Path) -> str:
    """Return a list item for each result in `folder`, with a link to its section of the page of measurements."""
    kinds = list(registry.KINDS)
    sections = sorted(_sections(folder).items(), key=lambda section: kinds.index(registry.read(section[1][0]).kind))
    return "\n".join(f"* [{name}](#{name}): {registry.sentence_of(*paths)}" for name, paths in sections) or NOTHING


def _sections(folder: Path) -> dict[str, list[Path]]:
    """Return result files by the name of their section: that of the file, or of the suite with a file for each machine."""
    sections: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        suite = path.stem.partition("-")[0]
        sections.setdefault(suite if suite in SIDE_BY_SIDE else path.stem, []).append(path)
    return sections


def measurements(folder: Path) -> str:
    """Return every result in `folder`, with a link to its file; of one with a page of its own the first table at most."""
    parts = []
    for name, paths in _sections(folder).items():
        document, page = registry.document_of(*paths), folder / PAGES.get(name, f"{name}.md")
        parts.append(f"## {name}")
        if page.exists():
            parts.append("  \n".join(map(escaped, document.headline)))
            parts += [table_markdown(table) for table in document.tables[:1] if len(table.rows) <= MOST_ROWS]
            parts.append(f"All measurements: [{page.name}]({os.path.relpath(page, folder.parent)})")
        else:
            parts.append(document_markdown(document, level=3))
        links = ", ".join(f"[{path.name}](results/{path.name})" for path in paths)
        parts.append(f"The file{'s' * (len(paths) > 1)}: {links}")
    return "\n\n".join(parts) or NOTHING


def whole(folder: Path, name: str, level: int = 2) -> str:
    """Return the document of the result `name`, its tables under headings of this level."""
    paths = _sections(folder).get(name)
    return document_markdown(registry.document_of(*paths), level=level) if paths else NOTHING


def gpu_suites(folder: Path) -> str:
    """Return the documents of the GPU suite, one for each device in `folder`; the way to make one where there is none."""
    paths = sorted(folder.glob("gpu*.json"))
    if not paths:
        return f"{NOTHING} Where there is a GPU: `dilkit bench --suite gpu`."
    return "\n\n".join(f"## {path.stem}\n\n{document_markdown(registry.document_of(path), level=3)}" for path in paths)
