"""Runs the kernels in Triton on the CPU, in Triton's interpreter, over cases of the problem list, in fp32 and fp16.

    python tests/backends/triton/interpret.py [--share I/N] [--all]

By default a case of each feature, cut to few rows, in one of the dtypes. Exit code 1 if one fails. A process of its own chooses
the interpreter before it imports the kernels. The interpreter multiplies bits of bf16 as whole numbers.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cases import TOGETHER  # noqa: E402
from helpers import huge_scores  # noqa: E402
from helpers.emulated import DTYPES, FEW_ROWS, parser_of_shares, passes, smallest  # noqa: E402

from dilkit import GlobalTokens, Pattern, SlidingWindow, register_backend  # noqa: E402
from dilkit.backend import Refusal  # noqa: E402
from dilkit.backends.triton.backend import TritonTiles  # noqa: E402
from dilkit.backends.triton.launch import kernel  # noqa: E402
from dilkit.backends.triton.sizes import Sizes  # noqa: E402
from dilkit.problem import Problem  # noqa: E402
from dilkit.testing.conformance import repeats_that_differ  # noqa: E402
from dilkit.testing.problems import OTHER_KINDS, PROBLEMS, SCORES, Case  # noqa: E402

OTHERS = ("dilated window causal", "global tokens", "window and global", "window and sinks", "blocks by heads causal", "prefix")
"""Cases of other kinds that are not left for --all."""


class InterpretingLauncher:
    """Small tiles for short sequences; those of GPUs run on the emulator of `tests/ptx`."""

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        return Sizes(16, 16, 4, 1)

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]):
        kernel(role)[(programs,)](*arguments, **constants)


class Interpreted(TritonTiles):
    name = "triton_interpreted"
    limits = replace(TritonTiles.limits, devices=frozenset({"cpu"}), dtypes=frozenset(DTYPES), min_capability=None)


def main() -> int:
    args = parser_of_shares(__doc__, "long").parse_args()
    number, shares = map(int, args.share.split("/"))
    register_backend(Interpreted(InterpretingLauncher()))
    cases = [*together(), *(every() if args.all else smallest(64)), *other_kinds(args.all)]
    chosen = cases[number - 1 :: shares]
    failed = [case.name for case in chosen if not passes(Interpreted.name, case)]
    if number == 1:
        for dtype in DTYPES:
            huge_scores.check(Interpreted.name, dtype, seq=2 * FEW_ROWS)
    if repeats_that_differ(Interpreted.name, cases[0], "cpu", 1):
        failed.append("repeated")
    print(f"{len(chosen)} cases, failed: {' '.join(failed) or 'none'}")
    return bool(failed or not chosen)


def together() -> Iterator[Case]:
    for i, (variant, fields) in enumerate(TOGETHER.items()):
        yield Case(feature="branches together", variant=variant, batch=1, dtype=DTYPES[i // 2 % 2], **fields)


def every() -> Iterator[Case]:
    yield from (case for case in PROBLEMS if case.dtype in DTYPES)
    yield from (case for case in SCORES if case.dtype in DTYPES and not case.rows and not refusals(case))


def other_kinds(everything: bool) -> Iterator[Case]:
    """Cases of windows, strides, global tokens and runs, alone and in mixes, and two more that count once."""
    for i, case in enumerate(case for case in OTHER_KINDS if case.dtype in DTYPES):
        if (everything or (case.variant in OTHERS and case.dtype == DTYPES[i // 2 % 2])) and not refusals(case):
            yield case if everything else replace(case, batch=1, seq=min(case.seq, 2 * FEW_ROWS))
    if everything:
        kinds = SlidingWindow(24, 2), SlidingWindow(7), GlobalTokens([0, 9, 11, 33]), GlobalTokens(3, "read", heads=(1, 3))
        for causal in (False, True):
            pattern = Pattern.of(*kinds, overlap="once")
            yield Case(feature="kinds", variant=f"once {causal}", pattern=pattern, seq=61, kv_heads=2, is_causal=causal)


def refusals(case: Case) -> tuple[Refusal, ...]:
    return Interpreted().refusals(case.problem())


if __name__ == "__main__":
    sys.exit(main())
