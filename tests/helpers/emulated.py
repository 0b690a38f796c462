"""Cases for interpreters and simulators of kernels, and a line of output for each."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from dilkit.testing.conformance import check
from dilkit.testing.problems import PROBLEMS, Case

SOME_ROWS, FEW_ROWS = 15, 20
DTYPES = ("float32", "float16")


def smallest(most_columns: int) -> Iterator[Case]:
    """Yield each feature's smallest case, cut to few rows and columns, in one of two dtypes; and one token."""
    cheapest: dict[str, Case] = {}
    for case in PROBLEMS:
        if case.dtype == "float32" and case.seq >= SOME_ROWS:
            known = cheapest.setdefault(case.feature, case)
            cheapest[case.feature] = min(known, case, key=lambda c: c.problem().flops() * (1 + 2 * c.gradients))
    for i, (feature, case) in enumerate(cheapest.items()):
        sizes = dict(seq=min(case.seq, FEW_ROWS), head_dim=min(case.head_dim, most_columns))
        yield replace(case, **sizes, dtype=DTYPES[i // 2 % 2], batch=case.batch if feature == "batch" else 1)
    yield next(case for case in PROBLEMS if case.seq == 1 and case.dtype == "float32")


def passes(backend: str, case: Case) -> bool:
    start = time.process_time()
    result = check(backend, case)
    seconds = time.process_time() - start
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in result.ratios.items())
    print(f"{result.verdict} {case.name} ({seconds:.1f} s): {ratios} {'; '.join(result.reasons)}", flush=True)
    return result.verdict == "passed"


def parser_of_shares(description: str, all_takes: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--share", default="1/1", help="which of how many shares to run")
    parser.add_argument("--all", action="store_true", help=f"run every case, which takes {all_takes}")
    return parser
