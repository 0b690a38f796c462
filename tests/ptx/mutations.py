"""Breaks the PTX of the kernels in one place after another, and shows whether the machine notices.

    python tests/ptx/mutations.py [--kernel TEXT] [--each N] [--only TEXT] [--json FILE]

Of every kernel and every kind of fault, N places are tried, spread over all there are. A fault is caught where a run is refused,
or its results are wrong. Of those that live `survivors.py` says why they do. Exit code 1 if one lives that is not explained
there, or is caught although it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx.backends import is_installed
from ptx.launcher import Options
from ptx.subjects import SUBJECTS, Subject
from ptx.survivors import SURVIVORS
from ptx.trials import run
from tqdm import tqdm

SEEDS = 0, 1


@dataclass(frozen=True)
class Mutation:
    """The fault of a kind at a place of its kernel: so many parts of all places on, in any version that is compiled."""

    kernel: str
    fault: str
    part: int
    parts: int

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.fault} {self.part}/{self.parts}"


def main() -> int:
    """0 when all faults are caught, but for those that are explained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--each", type=int, default=0, help="places of each kind in each kernel, instead of its own number")
    parser.add_argument("--kernel", default="", help="kernels whose names hold this text")
    parser.add_argument("--only", default="", help="mutations whose names hold this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of them there")
    args = parser.parse_args()
    kernels = [name for name, subject in SUBJECTS.items() if args.kernel in name and is_installed(subject.trials[0].backend)]
    chosen = [
        one for kernel in kernels for one in mutations(kernel, args.each or SUBJECTS[kernel].places) if args.only in one.name
    ]
    found = {}
    for one in tqdm(chosen, unit="mutation"):
        found[one.name] = reason = caught(one)
        if bool(reason) == (one.name in SURVIVORS):
            tqdm.write(f"{one.name}: {f'caught, and yet explained: {reason}' if reason else 'LIVES'}")
    lives = [name for name, reason in found.items() if not reason]
    print(f"{len(found)} mutations, {len(found) - len(lives)} caught, {len(set(lives) & set(SURVIVORS))} explained")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(bool(reason) == (name in SURVIVORS) for name, reason in found.items()))


def mutations(kernel: str, each: int) -> Iterator[Mutation]:
    """Of each kind, places that are spread over all there are, no more than the first version has that its trials run."""
    texts: list[str] = []
    subject = SUBJECTS[kernel]
    run(subject.trials[0], 0, Options(change=partial(kept, texts, subject)))
    for fault, (pattern, _) in subject.faults.items():
        parts = min(each, len(re.findall(pattern, texts[0])))
        for part in range(parts):
            yield Mutation(kernel, fault, part, parts)


def kept(texts: list[str], subject: Subject, text: str) -> str:
    if subject.is_in(text):
        texts.append(text)
    return text


def caught(mutation: Mutation) -> str:
    """What is said of the fault; "" if it is not noticed."""
    subject = SUBJECTS[mutation.kernel]
    options = Options(change=partial(broken, mutation), loops=subject.loops)
    outcomes = (run(trial, seed, options) for seed in SEEDS for trial in subject.trials)
    return next((outcome.reason for outcome in outcomes if outcome.reason), "")


def broken(mutation: Mutation, text: str) -> str:
    """PTX with the fault, if it is of the kernel."""
    subject = SUBJECTS[mutation.kernel]
    if not subject.is_in(text):
        return text
    pattern, new = subject.faults[mutation.fault]
    found = [*re.finditer(pattern, text)]
    if not found:
        return text
    one = found[len(found) * mutation.part // mutation.parts]
    return text[: one.start()] + one.expand(new) + text[one.end() :]


if __name__ == "__main__":
    sys.exit(main())
