"""The first lines of a document: where a result was measured, by which revision and when, and what is missing from it."""

from __future__ import annotations

from dilkit.tools.results.record import Environment, Result
from dilkit.tools.results.rows import RowsResult


def revision(where: Environment) -> str:
    """Return the revision of an environment, to stand behind a version; empty outside a checkout."""
    changes = " with changes" if where.git_dirty else ""
    return f", revision {where.git_revision[:10]}{changes}" if where.git_revision else ""


def place(result: Result) -> str:
    """Return device, versions, revision and date in a line."""
    where = result.environment
    threads = f"{where.threads} thread{'s' * (where.threads != 1)}"
    return f"{where.device_name}, {threads}, torch {where.torch}, dilkit {where.dilkit}{revision(where)}, {result.date}"


def suite_headline(
    result: RowsResult, where: str, packages: str = "", shortened: str = "lengths", figures: str = "figure"
) -> tuple[str, ...]:
    """Return `where`, then versions (`packages` in torch's stead), revision and date, then warnings of a run that is not whole.

    `shortened` names what --quick has divided, and `figures` what is then not comparable.
    """
    facts = result.environment
    lines = [where, f"{packages or f'torch {facts.torch}'}, dilkit {facts.dilkit}{revision(facts)}, {result.date}"]
    if result.quick:
        lines.append(f"QUICK: {shortened} are 1/{result.quick} of the suite's, so that no {figures} says what the suite's would")
    return (*lines, *["INTERRUPTED: later measurements are missing"] * result.interrupted)


def placed(result: Result, sentence: str, where: str = "") -> str:
    """Return a sentence with `where` it was measured, by default the device, and warnings of a run that was cut short."""
    flags = [name.upper() for name in ("quick", "interrupted") if getattr(result, name, False)]
    return f"{sentence} ({', '.join([where or result.environment.device_name, *flags])})."
