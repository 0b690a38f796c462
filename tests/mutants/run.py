"""Puts faults into a copy of the checkout, and shows which the default tests miss. `--random N`: faults of Python.

"killed": a test failed. "LIVES": all passed, or none reaches it. Exit code 1 if one lives or does not apply.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants.compiled import MUTANTS
from mutants.faults import Fault, drawn
from mutants.mutant import Mutant
from mutants.place import LIMIT, Place

KILLED, LIVES, STALE, SKIPPED = "killed", "LIVES", "does not apply", "skipped"
FAILED, INTERRUPTED = 1, 2
"""Exit codes of pytest: a test failed; a module cannot be imported. Where nothing was selected it is 5."""


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant | Fault
    verdict: str
    seconds: float = 0.0
    why: str = ""

    def to_dict(self) -> dict[str, object]:
        named = dict(file=self.mutant.file, fault=str(self.mutant), breaks=self.mutant.breaks)
        return dict(**named, verdict=self.verdict, seconds=round(self.seconds, 1), why=self.why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N faults of Python in the place of those of C")
    parser.add_argument("--seed", type=int, default=0, help="draws other faults")
    parser.add_argument("--only", default="", metavar="WORD", help="the mutants with this in their file or in what they break")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="make the copy here and keep it: the next run builds less")
    args = parser.parse_args()
    compiled = [mutant for mutant in MUTANTS if args.only in f"{mutant.file} {mutant.breaks}"]
    chosen = drawn(args.random, args.seed, args.only) if args.random else compiled
    if not chosen:
        parser.error(f"no mutant has {args.only!r} in its file or in what it breaks")
    if args.folder:
        return tried(chosen, Place(args.folder.absolute()), args.json)
    with tempfile.TemporaryDirectory() as folder:
        return tried(chosen, Place(Path(folder)), args.json)


def tried(chosen: list[Mutant] | list[Fault], place: Place, as_json: bool) -> int:
    print("a copy of the checkout is being made, and its tests run as they are ...", file=sys.stderr, flush=True)
    place.prepare()
    tests = dict.fromkeys(test for mutant in chosen if not missing(mutant.needs) for test in mutant.tests.split())
    done = place.test(" ".join(tests), watched=isinstance(chosen[0], Fault))
    if done.returncode:
        print(f"{done.stdout[-8000:]}\nthese tests fail without any mutant: nothing can be said", file=sys.stderr)
        return 1
    found = [outcome(mutant, place) for mutant in tqdm(chosen, file=sys.stderr, unit="mutant", leave=False)]
    bad = [one for one in found if one.verdict in (LIVES, STALE)]
    print(json.dumps(dict(mutants=[one.to_dict() for one in found], bad=len(bad)), indent=1) if as_json else table(found))
    return int(bool(bad))


def outcome(mutant: Mutant | Fault, place: Place) -> Outcome:
    started = time.monotonic()
    if why := missing(mutant.needs):
        return Outcome(mutant, SKIPPED, why=why)
    tests = mutant.tests if isinstance(mutant, Mutant) else " ".join(place.reaching(mutant))
    if not tests:
        return Outcome(mutant, LIVES, why=f"no test in {mutant.tests} reaches it")
    try:
        with place.broken_by(mutant):
            done = place.test(f"-x {tests}", LIMIT)
    except subprocess.TimeoutExpired:
        return Outcome(mutant, KILLED, time.monotonic() - started, f"its tests had not ended after {LIMIT:g} seconds")
    except (OSError, ValueError, RuntimeError) as error:  # a compiler that refuses it is no test
        return Outcome(mutant, STALE, time.monotonic() - started, str(error))
    return Outcome(mutant, verdict(done.returncode), time.monotonic() - started, first_failure(done.stdout))


def verdict(code: int) -> str:
    return KILLED if code in (FAILED, INTERRUPTED) or code < 0 else LIVES


def first_failure(text: str) -> str:
    lines = text.splitlines() or [""]
    return next((line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1])


def missing(needs: str) -> str:
    there = not needs or (shutil.which(needs) if needs == "g++" else importlib.util.find_spec(needs))
    return "" if there else f"{needs} is not installed"


def table(found: list[Outcome]) -> str:
    width = max(len(one.mutant.file) for one in found)
    lines = [f"{one.verdict:<14}  {one.seconds:5.1f} s  {one.mutant.file:<{width}}  {one.mutant.breaks}" for one in found]
    lines += [f"{one.verdict}: {one.mutant}: {one.why}" for one in found if one.verdict != KILLED]
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in (KILLED, LIVES, STALE, SKIPPED)}
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)])


if __name__ == "__main__":
    sys.exit(main())
