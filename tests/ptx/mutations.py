"""Breaks the PTX of the kernels in one place after another, and shows whether the emulator notices."""

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

from ptx.emulator import MACHINE, Options
from ptx.faults import SUBJECTS, SURVIVORS
from ptx.run import PLACE, read, write
from ptx.trials import cpu_seconds, is_installed, run
from tqdm import tqdm

from dilkit.tools.bench.suites.ptx import FAULTS, code_digest, digest
from dilkit.tools.results.environment import now
from dilkit.tools.results.rows import ResultRow

SEEDS = 0, 1


@dataclass(frozen=True)
class Mutation:
    """Fault of a kind at a place of its kernel: after `part` of `parts` of all places, in any version that is compiled."""

    kernel: str
    fault: str
    part: int
    parts: int

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.fault} {self.part}/{self.parts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=0, help="places of each kind in each kernel, instead of its own number")
    parser.add_argument("--kernel", default="", help="kernels whose names hold this text")
    parser.add_argument("--only", default="", help="mutations whose names hold this text")
    parser.add_argument("--out", type=Path, metavar="FILE", default=PLACE, help="the file (default: %(default)s)")
    parser.add_argument("--anew", action="store_true", help="break also the kernels that the file has")
    args = parser.parse_args()
    executed, broken = read(args.out)
    noticed = {row.case["kernel"]: row for row in broken if not args.anew and not row.values["lives"]}
    by_kernel = {kernel: row for kernel, row in noticed.items() if row.values["machine"] == machine(kernel)}
    is_whole = not args.each and not args.only
    reasons: dict[str, str] = {}
    for kernel, subject in SUBJECTS.items():
        if args.kernel not in kernel or not is_installed(subject.backend) or (is_whole and kernel in by_kernel):
            continue
        start = cpu_seconds()
        tried = try_all(one for one in mutations(kernel, args.each or subject.places) if args.only in one.name)
        reasons |= tried
        if is_whole:
            by_kernel[kernel] = result(kernel, tried, cpu_seconds() - start)
            write(args.out, executed, [by_kernel[name] for name in SUBJECTS if name in by_kernel])
    lives = sum(not reason for reason in reasons.values())
    print(f"{len(reasons)} mutations, {len(reasons) - lives} caught, {lives} live")
    return int(any(bool(reason) == (name in SURVIVORS) for name, reason in reasons.items()))


def try_all(chosen: Iterable[Mutation]) -> dict[str, str]:
    """Return the reason why each fault is caught, by its name; "" where it is not."""
    reasons = {}
    for one in tqdm([*chosen], unit="mutation"):
        reasons[one.name] = reason = caught(one)
        if bool(reason) == (one.name in SURVIVORS):
            tqdm.write(f"{one.name}: {f'caught, and yet explained: {reason}' if reason else 'LIVES'}")
    return reasons


def result(kernel: str, reasons: dict[str, str], seconds: float) -> ResultRow:
    lives = {name for name, reason in reasons.items() if not reason}
    backend = SUBJECTS[kernel].backend
    values: dict[str, Any] = dict(source=digest(backend), machine=machine(kernel), date=now(), seconds=round(seconds, 1))
    values |= dict(caught=len(reasons) - len(lives), explained=len(lives & set(SURVIVORS)), lives=sorted(lives - set(SURVIVORS)))
    return ResultRow(table=FAULTS, case=dict(kernel=kernel), who=backend, values=values)


@cache
def machine(kernel: str) -> str:
    """Return a digest of the faults of a kernel, of the trials that show them, and of the emulator that may notice."""
    return code_digest((*MACHINE.parent.glob("*.py"), *MACHINE.glob("*.[ch]")), repr(SUBJECTS.get(kernel)))


def mutations(kernel: str, each: int) -> Iterator[Mutation]:
    """Yield places of each kind, spread over all that the first version has that a trial runs."""
    texts: list[str] = []
    subject = SUBJECTS[kernel]

    def note(text):
        texts.extend([text] * subject.is_in(text))
        return text

    run(subject.trials[0], 0, Options(change=note))
    for fault, (pattern, _) in subject.faults.items():
        parts = min(each, len(re.findall(pattern, texts[0])))
        for part in range(parts):
            yield Mutation(kernel, fault, part, parts)


def caught(mutation: Mutation) -> str:
    subject = SUBJECTS[mutation.kernel]
    options = Options(change=partial(broken_text, mutation), loops=subject.loops)
    outcomes = (run(trial, seed, options) for seed in SEEDS for trial in subject.trials)
    return next((outcome.reason for outcome in outcomes if outcome.reason), "")


def broken_text(mutation: Mutation, text: str) -> str:
    """Return PTX with the fault, if it is of the kernel."""
    subject = SUBJECTS[mutation.kernel]
    pattern, new = subject.faults[mutation.fault]
    places = [*re.finditer(pattern, text)] if subject.is_in(text) else []
    if not places:
        return text
    one = places[len(places) * mutation.part // mutation.parts]
    return text[: one.start()] + one.expand(new) + text[one.end() :]


if __name__ == "__main__":
    sys.exit(main())
