"""A session of the fuzzer in this process, started by `run.py`: seeds one after another, or steps from a file."""

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")  # or torch keeps gigabytes: a 16-bit matmul for each shape that it has seen

from fuzz.journal import CORPUS, Journal, keep, read, write
from fuzz.machine import Machine, machine_of
from fuzz.world import World
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from tqdm import tqdm

from dilkit.environment import TUNED

SHORTENING = 60
"""Seconds that may go into shortening the steps of a failure."""
RUNS, STEPS, MOST_FOUND = 10, 12, 10
"""Runs of a seed, steps of a run, and failures after which a session ends."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--found", type=Path, default=CORPUS)
    parser.add_argument("--only")
    parser.add_argument("--replay", type=Path, nargs="+")
    args = parser.parse_args()
    os.environ[TUNED.name] = "none"
    warnings.simplefilter("error", RuntimeWarning)
    warnings.filterwarnings("ignore", "torch.quantize_per_tensor|Sparse CSR tensor", UserWarning)  # tensors that are wrong here
    if args.replay:
        for path in args.replay:
            perform(read(path))
            print(f"{path.name}: right")
        return 0
    return fuzz(args.minutes, args.seed, args.journal, args.counts, args.found, args.only)


def perform(steps: list[dict[str, Any]]):
    world = World()
    try:
        for step in steps:
            world.perform(step)
    finally:
        world.close()


def fuzz(minutes: float, first: int, journal: Path, counts: Path, found: Path, only: str | None = None) -> int:
    done = Counter()
    Machine.journal, Machine.performed = Journal(journal), done
    start, failures = time.monotonic(), []
    with tqdm(total=round(minutes * 60), unit="s", disable=not sys.stderr.isatty()) as bar:
        number = first
        while (passed := time.monotonic() - start) < minutes * 60 and len(failures) < MOST_FOUND:
            failures += try_seed(number, journal, found, only)
            number += 1
            counts.write_text(json.dumps(dict(next=number, counts=done, failures=failures, ended=False)))
            bar.update(min(bar.total, round(passed)) - bar.n)
    counts.write_text(json.dumps(dict(next=number, counts=done, failures=failures, ended=True)))
    return bool(failures)


def try_seed(number: int, journal: Path, found: Path, only: str | None) -> list[str]:
    options = settings(
        max_examples=RUNS,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=[Phase.generate],  # which shrinks for minutes; dropping steps does most of it
    )
    try:
        run_state_machine_as_test(seed(number)(machine_of(only)), settings=options)
    except Exception as error:
        shorten(journal)
        kept = keep(journal, found)
        text = "".join(traceback.format_exception(error))
        print(f"seed {number} failed:\n{text}\nrepeat it with: python tests/fuzz/run.py --replay {kept}", flush=True)
        return [f"{kept.name}: {type(error).__name__}: {error}"]
    return []


def shorten(journal: Path):
    steps, start = read(journal), time.monotonic()
    for at in reversed(range(len(steps) - 1)):
        rest = steps[:at] + steps[at + 1 :]
        if time.monotonic() - start < SHORTENING and fails(rest):
            steps = rest
    write(journal, steps)


def fails(steps: list[dict[str, Any]]) -> bool:
    try:
        perform(steps)
    except Exception:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
