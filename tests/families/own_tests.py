"""Runs transformers' own tests of its models with sdpa, then with dilkit in its place, and sorts what differs.

    python tests/families/own_tests.py CHECKOUT [--only llama,bert] [--jobs 2] [--json] [what pytest takes, such as -k generate]

A row of the table is a family, a column a verdict. Each difference needs a reason in `differences.json`, else the exit code is 1.
Reasons that no difference used are listed. The package under test is that of the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS, REASONS = Path(__file__).resolve().parents[1], Path(__file__).with_name("differences.json")
FAMILIES = (
    *("bert", "bloom", "clip", "gemma2", "gemma3", "gpt2", "gpt_neox", "llama"),
    *("mistral", "mpt", "opt", "phi", "qwen2", "stablelm", "t5", "vit"),
)
ATTENTIONS = ("sdpa", "dilkit")
OPTIONS = ("-q", "--tb=short", "-p", "no:cacheprovider", "-o", "log_cli=0", "-p", "families.swap", "--timeout=200")
SECONDS = 3600
"""The limit of one run of a family's tests."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
VERDICTS = {
    (EQUAL := "equal"): "it passes with both",
    (UNASKED := "no attention"): "it passes with both, without a call of dilkit",
    (REFUSED := "refused"): "an error that dilkit raised",
    (NAMED := "name"): "it fails at the name of the attention",
    (WRONG := "wrong"): "any other difference, such as of numbers",
    (FAILS := "not counted"): "it does not pass with sdpa",
}
NAME_IN_FAILURE = re.compile(r"""attn_implementation|["']sdpa["']""")


@dataclass
class Outcome:
    """The outcome of one test. `calls`: of dilkit's attention. `error`: the exceptions of the first failure, the last one first.

    `refused`: True if one of the exceptions was raised in a file of dilkit.
    """

    test: str
    outcome: str = PASSED
    calls: int = 0
    error: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Reason:
    """Why tests differ. `tests`, `error`: regular expressions that match within a test's name and its error."""

    verdict: str
    error: str
    reason: str
    tests: str = ""

    def explains(self, verdict: str, outcome: Outcome) -> bool:
        return verdict == self.verdict and bool(re.search(self.tests, outcome.test) and re.search(self.error, outcome.error))


@dataclass(frozen=True)
class Difference:
    """A test that passes with sdpa alone."""

    verdict: str
    test: str
    error: str
    reason: Reason | None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkout", type=Path, help="a checkout of transformers, with its src and tests")
    parser.add_argument("--only", default=",".join(FAMILIES), metavar="A,B", help="families, folders of tests/models")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    args, options = parser.parse_known_args()
    families, reasons = args.only.split(","), [Reason(**one) for one in json.loads(REASONS.read_text(encoding="utf-8"))]
    if missing := [name for name in families if not (args.checkout / "tests/models" / name).is_dir()]:
        parser.error(f"{args.checkout} has no tests/models/{missing[0]}; a checkout of transformers is needed")
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(run, args.checkout.resolve(), name, attention, options) for name in families for attention in ATTENTIONS
        ]
        sdpa, dilkit = ([job.result() for job in runs[start::2]] for start in (0, 1))
    counts = {name: Counter(map(verdict, *paired(*both))) for name, *both in zip(families, sdpa, dilkit, strict=True)}
    found = [one for both in zip(sdpa, dilkit, strict=True) for one in differences(*both, reasons)]
    used = Counter(one.reason for one in found)
    unused = [one for one in reasons if one not in used]
    if args.json:
        print(json.dumps({"counts": counts, "differences": [*map(asdict, found)], "unused": [*map(asdict, unused)]}, indent=1))
    else:
        print("\n".join(table(counts)), *(f"{n:5} {one.verdict}: {one.reason}" for one, n in used.most_common() if one), sep="\n")
        print(*(f"no reason: {one.verdict}: {one.test}: {one.error}" for one in found if one.reason is None), sep="\n")
        print(*(f"unused: {one.verdict}: {one.reason}" for one in unused), sep="\n")
    return int(None in used or not all(row[EQUAL] for row in counts.values()))


def run(checkout: Path, family: str, attention: str, options: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes of a family's tests with an attention. Those that a crash or the time limit has cut off are missing."""
    paths = sorted(map(str, (checkout / "tests/models" / family).glob("test_modeling_*.py")))
    variables = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(checkout / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [
            sys.executable,
            "-m",
            "pytest",
            *OPTIONS,
            f"--attention={attention}",
            f"--outcomes={file.name}",
            *options,
            *paths,
        ]
        try:
            subprocess.run(command, cwd=checkout, env=variables, stdout=sys.stderr, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{family} with {attention}: no end after {SECONDS} s", file=sys.stderr)
        return outcomes_of(Path(file.name))


def outcomes_of(file: Path) -> dict[str, Outcome]:
    return {one.test: one for one in (Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())}


def paired(sdpa: Mapping[str, Outcome], dilkit: Mapping[str, Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """The outcomes of the same tests; of one that dilkit's run has not come to, one that says so."""
    return [*sdpa.values()], [dilkit.get(test, Outcome(test, "missing", error="the run ended before it")) for test in sdpa]


def verdict(sdpa: Outcome, dilkit: Outcome) -> str:
    if sdpa.outcome != PASSED:
        return FAILS
    if dilkit.outcome == PASSED:
        return EQUAL if dilkit.calls else UNASKED
    return REFUSED if dilkit.refused else NAMED if NAME_IN_FAILURE.search(dilkit.error) else WRONG


def differences(sdpa: Mapping[str, Outcome], dilkit: Mapping[str, Outcome], reasons: Sequence[Reason]) -> Iterator[Difference]:
    for before, outcome in zip(*paired(sdpa, dilkit), strict=True):
        if (kind := verdict(before, outcome)) in (REFUSED, NAMED, WRONG):
            reason = next((one for one in reasons if one.explains(kind, outcome)), None)
            yield Difference(kind, outcome.test, outcome.error, reason)


def table(counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    total = sum((Counter(row) for row in counts.values()), Counter[str]())
    yield f"{'':12}" + "".join(f"{name:>14}" for name in VERDICTS)
    for name, row in [*counts.items(), ("all", total)]:
        yield f"{name:12}" + "".join(f"{row.get(name, 0):14}" for name in VERDICTS)


if __name__ == "__main__":
    sys.exit(main())
