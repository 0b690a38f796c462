"""The first lines of a document: where a result was measured, by which revision and when, and what is missing from it."""

from __future__ import annotations

from dilkit.tools.results.record import Environment, Result
from dilkit.tools.results.rows import RowsResult


def revision(where: Environment) -> str:
    """The revision of an environment, to stand behind a version; empty outside a checkout."""
    changes = " with changes" if where.git_dirty else ""
    return f", revision {where.git_revision[:10]}{changes}" if where.git_revision else ""


def place(result: Result) -> str:
    """Device, versions, revision and date, in a line."""
    at = result.environment
    threads = f"{at.threads} thread{'s' * (at.threads != 1)}"
    return f"{at.device_name}, {threads}, torch {at.torch}, dilkit {at.dilkit}{revision(at)}, {result.date}"


def suite_headline(
    result: RowsResult, where: str, packages: str = "", shortened: str = "lengths", figures: str = "figure"
) -> tuple[str, ...]:
    """`where`, then versions (`packages` in torch's stead), revision and date, then what to know of a run that is not whole.

    `shortened` is what --quick has divided, so that none of the `figures` says what the suite's would.
    """
    at = result.environment
    lines = [where, f"{packages or f'torch {at.torch}'}, dilkit {at.dilkit}{revision(at)}, {result.date}"]
    if result.quick:
        lines.append(f"QUICK: {shortened} are 1/{result.quick} of the suite's, so that no {figures} says what the suite's would")
    return (*lines, *["INTERRUPTED: later measurements are missing"] * result.interrupted)


def placed(result: Result, sentence: str, where: str = "") -> str:
    """A sentence with `where` it was measured, by default the device, and with what to know of a run that was cut short."""
    flags = [name.upper() for name in ("quick", "interrupted") if getattr(result, name, False)]
    return f"{sentence} ({', '.join([where or result.environment.device_name, *flags])})."
