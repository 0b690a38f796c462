"""The first lines of a document: where a result was measured, by which revision and when, and what is missing from it."""

from dilkit.tools.results.environment import Environment, Result


def revision(where: Environment) -> str:
    """Return the revision of an environment, to stand behind a version; empty outside a checkout."""
    changes = " with changes" if where.git_dirty else ""
    return f", revision {where.git_revision[:10]}{changes}" if where.git_revision else ""


def place(result: Result) -> str:
    """Return device, versions, revision and date in a line."""
    where = result.environment
    threads = f"{where.threads} thread{'s' * (where.threads != 1)}"
    return f"{where.device_name}, {threads}, torch {where.torch}, dilkit {where.dilkit}{revision(where)}, {result.date}"


def placed(result: Result, sentence: str, where: str = "") -> str:
    """Return a sentence with `where` it was measured, by default the device, and warnings of a run that was cut short."""
    flags = [name.upper() for name in ("quick", "interrupted") if getattr(result, name, False)]
    return f"{sentence} ({', '.join([where or result.environment.device_name, *flags])})."
