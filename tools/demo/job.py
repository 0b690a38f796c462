"""What a run of either demo has in common: it prints as it goes, and ends with a whole report, at any point by Ctrl-C."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from tqdm import tqdm

from dilkit.tools.console.interrupt import INTERRUPTED
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report import registry
from dilkit.tools.report.document import Row
from dilkit.tools.report.markdown import document_markdown
from dilkit.tools.results.decode import decode, encode
from dilkit.tools.results.file import write_result, write_text
from dilkit.tools.results.kinds.demo import Choice
from dilkit.tools.results.record import Result

R = TypeVar("R", bound=Result)

Picture = Callable[[Path], None]
"""Draws into a file."""
_BAR = "{percentage:5.0f} % |{bar:30}| {desc}"
_NARROWEST = 10
"""Characters of a column."""


class Job(ABC, Generic[R]):
    """One run of a demo. Making it does all that can fail for bad input, before any time is spent.

    `speaks`: whether this process prints and writes. `stage`: what it is doing.
    """

    TITLE: ClassVar[str]
    PICTURES: ClassVar[tuple[str, ...]]
    """The files that a report may show, the first of them first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.stage = args, "starting"
        self.interrupted: str | None = None
        self.speaks = True
        if args.threads is not None:
            torch.set_num_threads(args.threads)

    @abstractmethod
    def work(self) -> None:
        """Do it all, `stage` by stage."""

    @abstractmethod
    def result(self) -> R:
        """All there is so far."""

    @abstractmethod
    def pictures(self, result: R) -> dict[str, Picture]:
        """What draws each of the `PICTURES` for which there is something to show."""

    def closing(self, result: R) -> list[str]:
        """What is left to say at the end."""
        return []

    def run(self) -> int:
        """Work and report; the exit code."""
        try:
            self.work()
        except KeyboardInterrupt:
            self.interrupted = self.stage
            self.say(f"\ninterrupted while {self.stage}")
        self.finish()
        return INTERRUPTED if self.interrupted else 0

    def finish(self) -> None:
        """Write the report, and say where it is."""
        if not self.speaks:
            return
        result = self.result()
        notes = self.write(result)
        if self.args.json:
            print(json.dumps(encode(result), allow_nan=False))
        for line in ["", *notes, f"report     {self.args.out / 'report.md'}", *self.closing(result)]:
            self.say(line)

    def write(self, result: R, draw: bool = True) -> list[str]:
        """Write report.json, report.md and, where matplotlib can be imported, the pictures. Returns what was not done."""
        out, undrawn = self.args.out, why_undrawn() if draw else "not yet drawn"
        pictures = {} if undrawn else self.pictures(result)
        write_result(result, out / "report.json")
        document = registry.KINDS[result.KIND].document(result)
        shown = [f"![{Path(name).stem}]({name})" for name in pictures]
        write_text(out / "report.md", "\n\n".join([f"# {self.TITLE}", *shown, document_markdown(document)]) + "\n")
        for name in self.PICTURES if draw else ():  # an earlier run's picture would not belong to this report
            (out / name).unlink(missing_ok=True)
        for name, draw_picture in pictures.items():
            draw_picture(out / name)
        return [f"no pictures: {undrawn} (pip install 'dilkit[plot]')"] if undrawn else []

    def say(self, line: str = "") -> None:
        """Print a line above the progress bar, if there is one; nothing with --json, nor where another process speaks."""
        if self.speaks and not self.args.json:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def say_facts(self, facts: Sequence[Row]) -> None:
        """Print what will be done."""
        for name, line in facts:
            self.say(f"{name:<11}{line}")

    def say_table(self, header: Row) -> Callable[[Row], None]:
        """Print the head of a table; the function that prints its rows as they come."""
        widths = [max(len(name), _NARROWEST) for name in header]

        def say_row(row: Row) -> None:
            self.say("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())

        self.say()
        say_row(header)
        return say_row

    def train(self, trainer: Trainer[Any], judgements: int, describe: Callable[[], str], judged: Callable[[], Any]) -> None:
        """Train with a progress bar, which `describe` labels."""
        hidden = None if self.speaks and not self.args.json else True  # None: hidden where there is no terminal
        with tqdm(total=1.0, leave=False, disable=hidden, bar_format=_BAR) as bar:

            def advance() -> None:
                bar.set_description_str(describe(), refresh=False)
                bar.update(trainer.spent - bar.n)

            trainer.run(judgements, advance, judged)


def why_undrawn() -> str:
    """What keeps matplotlib from being imported; empty when nothing does."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        return str(error)
    return ""


def choice_of(trace: Any) -> Choice:
    """A selector's trace as a record."""
    return decode(Choice, trace.to_dict())
