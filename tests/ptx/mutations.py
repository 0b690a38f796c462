"""Breaks the PTX of the kernels in one place after another, and shows whether the machine notices.

    python tests/ptx/mutations.py [--kernel TEXT] [--each N] [--only TEXT] [--out FILE] [--anew]

Of every kernel and every kind of fault, N places are tried, spread over all there are. A fault is caught where a run is refused,
or its results are wrong. Of those that live `survivors.py` says why they do. What came of a kernel's own number of places is
added to docs/results/ptx.json; a kernel that is there as it is, broken on the machine as it is, is not broken again. Exit code 1
if one lives that is not explained, or is caught although it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ptx import results, subjects
from ptx.backends import is_installed
from ptx.launcher import Options
from ptx.library import made_by
from ptx.source import digest as digest_of
from ptx.subjects import SUBJECTS, Subject
from ptx.survivors import SURVIVORS
from ptx.trials import cpu_seconds, run
from tqdm import tqdm

from dilkit.tools.bench.ptx.record import Broken
from dilkit.tools.bench.ptx.sources import DIGITS, digest
from dilkit.tools.results.environment import now

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
    parser.add_argument("--out", type=Path, metavar="FILE", default=results.PLACE, help="the file (default: %(default)s)")
    parser.add_argument("--anew", action="store_true", help="break also the kernels that the file has")
    args = parser.parse_args()
    executed, broken = results.read(args.out)
    by_kernel = {one.kernel: one for one in broken if one.machine == machine() and not (args.anew or one.lives)}
    found: dict[str, str] = {}
    for kernel, subject in SUBJECTS.items():
        is_whole = not args.each and not args.only
        if args.kernel not in kernel or not is_installed(subject.trials[0].backend) or (is_whole and kernel in by_kernel):
            continue
        start = cpu_seconds()
        own = try_all(one for one in mutations(kernel, args.each or subject.places) if args.only in one.name)
        found |= own
        if is_whole:
            by_kernel[kernel] = came_of(kernel, own, cpu_seconds() - start)
            results.write(args.out, executed, [by_kernel[name] for name in SUBJECTS if name in by_kernel])
    lives = sum(not reason for reason in found.values())
    print(f"{len(found)} mutations, {len(found) - lives} caught, {lives} live")
    return int(any(bool(reason) == (name in SURVIVORS) for name, reason in found.items()))


def try_all(chosen: Iterable[Mutation]) -> dict[str, str]:
    """What is said of each fault, by its name."""
    found = {}
    for one in tqdm([*chosen], unit="mutation"):
        found[one.name] = reason = caught(one)
        if bool(reason) == (one.name in SURVIVORS):
            tqdm.write(f"{one.name}: {f'caught, and yet explained: {reason}' if reason else 'LIVES'}")
    return found


def came_of(kernel: str, found: dict[str, str], seconds: float) -> Broken:
    lives = {name for name, reason in found.items() if not reason}
    backend = SUBJECTS[kernel].trials[0].backend
    of: dict[str, Any] = dict(kernel=kernel, backend=backend, source=digest(backend), machine=machine(), date=now())
    counts: dict[str, int] = dict(caught=len(found) - len(lives), explained=len(lives & set(SURVIVORS)))
    return Broken(**of, **counts, seconds=round(seconds, 1), lives=tuple(sorted(lives - set(SURVIVORS))))


@cache
def machine() -> str:
    """A digest of what breaks kernels, and of what may notice it."""
    return digest_of((Path(subjects.__file__).read_text(), *made_by()))[:DIGITS]


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
