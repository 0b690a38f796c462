"""`dilkit doctor`: what of this installation works, what does not, and the way out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from dilkit.tools.commands.doctor import installation
from dilkit.tools.commands.doctor.finding import Finding, all_of
from dilkit.tools.commands.info.facts import guarded
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json, table
from dilkit.tools.results.decode import encode

HELP = """\
check this installation: what works, what does not, and the way out

Every backend computes a small problem, forward and gradients, against the fp64 oracle; two ranks meet over each transport;
compiled modules, threads, files and DILKIT_* variables are looked at. What is optional and absent is not wrong. Exit code 1 when
anything is wrong. The report of a bug should have what it prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> int:
    """Print what was found. 0 = nothing is wrong, 1 = something is."""
    guarded(load_torch)
    parts: dict[str, Callable[[], Iterable[Finding]]] = {
        "installation": installation.installed,
        "compiled modules": installation.extensions,
        "threads": installation.threads,
        "backends": partial(_computing, "backends"),
        "GPUs": partial(_computing, "gpus"),
        "ranks": partial(_computing, "ranks"),
        "files": installation.kept_files,
        "environment": installation.set_variables,
    }
    found = {title: all_of(look) for title, look in parts.items()}
    wrong = [finding for findings in found.values() for finding in findings if finding.state == "WRONG"]
    if args.json:
        print_json("doctor", dict(right=not wrong, parts=encode(found)))
    else:
        print("\n".join(_lines(found, len(wrong))))
    return 1 if wrong else 0


def _computing(part: str) -> Iterator[Finding]:
    """A part that cannot even be imported without torch."""
    from dilkit.tools.commands.doctor import backends as computing

    looked: Iterator[Finding] = getattr(computing, part)()
    return looked


def _lines(found: dict[str, list[Finding]], wrong: int) -> Iterator[str]:
    for title, findings in found.items():
        yield from (title, *table((one.name, one.state, str(one)) for one in findings), "")
    yield f"{wrong} WRONG: each names its way out" if wrong else "nothing is wrong"
