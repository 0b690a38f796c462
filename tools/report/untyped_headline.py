"""The first lines of a report: where a result was measured, by which revision and when, and what is missing from it."""

from __future__ import annotations

from typing import Any


def revision(where: dict[str, Any]) -> str:
    """Which revision an environment had, ready to stand behind a version; empty outside a checkout."""
    changes = " with changes" if where["git_dirty"] else ""
    return f", revision {where['git_revision'][:10]}{changes}" if where["git_revision"] else ""


def suite_headline(
    result: dict[str, Any], place: str, packages: str = "", quick: str = "lengths", figures: str = "figure"
) -> list[str]:
    """Lines for a suite's result: the `place`, then versions (`packages` in torch's stead), revision and date, then what to know.

    `quick` is what --quick has shortened, so that none of the `figures` says what the suite's would.
    """
    where = result["environment"]
    packages = packages or f"torch {where['torch']}"
    lines = [place, f"{packages}, dilkit {where['dilkit']}{revision(where)}, {result['date']}"]
    if result["quick"]:
        lines.append(f"QUICK: {quick} are 1/{result['quick']} of the suite's, so that no {figures} says what the suite's would")
    return lines + (["INTERRUPTED: later measurements are missing"] if result["interrupted"] else [])
