"""Random problems against the oracle in double precision, on each backend of the CPU.

    python tests/fuzz/problems.py [--count 1000] [--first 0] [--backends native sdpa reference] [--json FILE]

Problem i is the same everywhere, whatever ran before it: `--first i --count 1` computes it alone. What is right is what the
conformance suite says (`dilkit.testing.conformance`); what it rejects is wrong unless rounding explains it (`rounding`), and is
counted apart. The exit code is 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")  # or torch keeps gigabytes: a 16-bit matmul for each shape that it has seen

from fuzz.rounding import within_rounding
from tqdm import tqdm

from dilkit import Pattern
from dilkit.environment import TUNED
from dilkit.problem import DTYPES
from dilkit.testing import conformance
from dilkit.testing.accuracy import differentiated
from dilkit.testing.bias_forms import BIAS_FORMS
from dilkit.testing.conformance import Result
from dilkit.testing.problems import LAYOUTS, SINKS, VALUES, Case
from dilkit.testing.tensors import make_tensors

BACKENDS = ("native", "sdpa", "reference")
MASKS = ("random", "left", "right", "element", "all")
MOST_TOKENS, MOST_ENTRIES = 500, 3 * 2**20
"""The longest sequence, and the largest matrix of scores, of all heads and sequences: the oracle writes it out."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every backend was right or refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000, help="how many problems (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (default: %(default)s)")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to FILE, too")
    args = parser.parse_args(argv)
    os.environ[TUNED.name] = "none"
    start = time.monotonic()
    counts: dict[str, Counter[str]] = {name: Counter() for name in args.backends}
    wrong = []
    for number in tqdm(range(args.first, args.first + args.count), unit="problem", disable=not sys.stderr.isatty()):
        for found in judged(random_case(number), args.backends):
            counts[found.backend][found.verdict] += 1
            if found.verdict not in ("passed", "refused", "rounded"):
                wrong.append(f"{found.backend}, problem {number}: {'; '.join(found.reasons)}\n    {found.case}")
                print(wrong[-1], flush=True)
    report(counts, args.count, time.monotonic() - start)
    if args.json:
        args.json.write_text(json.dumps(dict(first=args.first, count=args.count, counts=counts, wrong=wrong), indent=1))
    return bool(wrong)


def judged(case: Case, backends: Sequence[str]) -> list[Result]:
    """What became of each backend on `case`. What the oracle said is not kept: there is no room for thousands of problems."""
    conformance.expected.cache_clear()
    found = [conformance.check(name, case) for name in backends]
    return [replace(one, verdict="rounded") if one.verdict == "failed" and rounded(one) else one for one in found]


def rounded(result: Result) -> bool:
    """Whether a result that was rejected is of the right form, and no farther from the oracle than rounding explains."""
    if len(result.reasons) != sum("that of plain torch math" in reason for reason in result.reasons):
        return False
    case, tensors = result.case, make_tensors(result.case)
    gradients = "dq" in result.ratios
    found = differentiated(partial(conformance._call, case, result.backend), tensors, gradients)
    return within_rounding(case.problem(requires_grad=gradients), tensors, found, conformance.expected(case).exact, case.lengths)


def report(counts: dict[str, Counter[str]], problems: int, seconds: float) -> None:
    """One line for each backend."""
    print(f"{problems:,} problems in {seconds / 60:.0f} minutes")
    for name, count in counts.items():
        refused, rounded = count["refused"], count["rounded"]
        print(
            f"{name}: {count.total() - refused:,} computed, {refused:,} refused, {rounded:,} beyond the error of plain math but ",
            end="",
        )
        print(f"within rounding, {count.total() - refused - rounded - count['passed']:,} wrong")


def random_case(number: int) -> Case:
    """The problem of this number: of every sixth or so, the tokens are cut into sequences of different lengths."""
    draw = random.Random(number)
    case = with_positions(draw, random_batch(draw, number))
    if draw.random() < 0.67 or case.mask != "none":
        return case
    cuts = sorted(draw.choices(range(case.seq + 1), k=draw.choice([0, 1, 2, 5, 40])))
    lengths = tuple(stop - start for start, stop in pairwise((0, *cuts, case.seq)))
    return replace(case, batch=1, lengths=lengths)


def with_positions(draw: random.Random, case: Case) -> Case:
    """Of every third problem or so the scores are capped, have a bias, or both."""
    if draw.random() < 0.67 or case.values != "normal":
        return case
    return replace(case, bias=draw.choice(["none", *BIAS_FORMS]), softcap=draw.choice([0.0, 0.7, 5.0]))


def random_batch(draw: random.Random, number: int) -> Case:
    """A problem of equal sequences."""
    kv_heads = draw.choice([1, 1, 2, 2, 3, 4])
    heads = kv_heads * draw.choice([1, 1, 2, 3])
    batch = draw.choice([1, 1, 2, 3])
    longest = min(MOST_TOKENS, int((MOST_ENTRIES / (batch * heads)) ** 0.5))
    seq = draw.choice([draw.randint(1, 40), draw.randint(1, longest), draw.randint(longest // 2, longest)])
    dtype, values = draw.choice(DTYPES), draw.choice(("normal",) * 12 + VALUES[1:])
    ignored = values == "ignored NaN"
    return Case(
        feature="random",
        variant=str(number),
        pattern=random_pattern(draw, seq, heads, kv_heads),
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice([1, 3, 8, 16, 17, 24, 32, 40, 64]),
        batch=batch,
        dtype=dtype,
        is_causal=draw.random() < 0.5,
        mask=draw.choice(MASKS if ignored else ("none",) * len(MASKS) + MASKS),
        layout=draw.choice(LAYOUTS[:3] if ignored else LAYOUTS),  # "expanded" would carry NaN to where it is not ignored
        values=values,
        scale=draw.choice([None, None, None, 1.0, 0.0, -0.3, 0.01]),
        gradients=values != "huge" and draw.random() < 0.75,
        sink=draw.choice((*("none",) * 6, *SINKS)),
    )


def random_pattern(draw: random.Random, seq: int, heads: int, kv_heads: int) -> Pattern:
    """A pattern of one to four branches; nothing ties its segments and rates to each other or to the sequence."""
    if draw.random() < 0.05:
        return Pattern.dense()
    lengths = [
        draw.choice([draw.randint(1, 16), draw.randint(1, seq), draw.randint(1, 2 * seq), 2 ** draw.randint(0, 9)])
        for _ in range(draw.randint(1, 4))
    ]
    rates = [min(length, draw.choice([1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16, length])) for length in lengths]
    options: dict[str, Any] = dict(offset=draw.choice(["modulo", "block"]), overlap=draw.choice(["count", "count", "once"]))
    if draw.random() < 0.25:
        ranges = [sorted(draw.sample(range(heads + 1), 2)) for _ in lengths]
        options["heads"] = [draw.choice([None, (start, stop)]) for start, stop in ranges]
    if draw.random() < 0.2:
        first = draw.randint(0, 4)
        options["head_shard"] = (first, first + kv_heads + draw.randint(0, 4))
    if options["overlap"] == "count":
        options["tail"] = draw.choice(["exact", "exact", "zeros"])
    return Pattern(lengths, rates, **options)


if __name__ == "__main__":
    sys.exit(main())
