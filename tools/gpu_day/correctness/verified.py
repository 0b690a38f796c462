"""`dilkit verify` on the device: the problem list, and large cases computed again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dilkit.problem import DTYPES
from dilkit.testing.conformance import Result
from dilkit.testing.problems import LARGE
from dilkit.tools.commands.verify import LISTED, REPEATED, REPEATS, Judged, repeated
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.correctness.checking import checked
from dilkit.tools.gpu_day.record import Finding
from dilkit.tools.gpu_day.step import Context, Item, absent, judged, noted

EVERY = 25
"""Of so many cases a rehearsal takes one."""
SECONDS = 90.0
"""For the cases; repetitions come after them."""


def verified(context: Context, which: str) -> Iterator[Item]:
    """All cases, of one of our backends, of "torch" or of those "generated".

    First what is wrong, as it is found, then counts by dtype, then the bits of repetitions.
    """
    with backends.every_one(context) as found:
        names = found[which] if which in found else tuple(name for name in found["ours"] if name == which)
        if not names:
            yield absent(f"verify {which}", "cannot compute here: `dilkit info` says why")
            return
        large = [] if context.rehearse else LARGE
        # The large ones first: the last to end are short then.
        cases, repeats = (*large, *LISTED)[:: EVERY if context.rehearse else 1], 1 if context.rehearse else REPEATS
        results = []
        for result in checked(names, cases, context, SECONDS):
            results.append(result)
            if result.verdict in ("failed", "broken"):
                name, dtype = result.backend, result.case.dtype
                yield judged(f"{name}, {result.case.name}", "; ".join(result.reasons), name, dtype)
        if missing := len(cases) - len(results) // len(names):
            yield noted(f"verify {which}: cases left out", f"{missing} of {len(cases)}, for {SECONDS:.0f} seconds were over")
        for name in names:
            yield from _summed(name, [result for result in results if result.backend == name])
        for name, count in repeated(results, context.device, repeats).items():
            what = f"{name}, large cases ({', '.join(REPEATED)}) computed {repeats} times more"
            yield judged(what, f"{count} differ in a bit" if count else "", name, found="equal in every bit")


def _summed(name: str, results: list[Result]) -> Iterator[Finding]:
    """What became of a backend, by dtype."""
    for dtype in DTYPES:
        one = Judged([result for result in results if result.case.dtype == dtype])
        wrong = one.counts["failed"] + one.counts["broken"]
        if wrong or one.counts["passed"]:
            worst = max((r.worst for r in one.results if r.verdict == "passed" and r.ratios), default=0.0)
            counts = ", ".join(f"{count} {verdict}" for verdict, count in one.counts.items() if count)
            what, text = f"verify {name}, {dtype}", f"{counts}; the worst error that is right is {worst:.2f} of plain torch's"
            numbers = dict(wrong=float(wrong), passed=float(one.counts["passed"]))
            yield replace(judged(what, text if wrong else "", name, dtype, found=text), numbers=numbers)
