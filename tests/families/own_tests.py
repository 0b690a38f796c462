"""Runs transformers' own tests of its models with sdpa, then with dilkit in its place, and sorts what differs.

    python tests/families/own_tests.py CHECKOUT [--only llama,bert] [--jobs 2] [--json] [what pytest takes, such as -k generate]

The table has a row for each family and a column for each verdict. Exit code 1 for a difference without a reason in
`differences.json`. As a plugin of pytest, this file puts dilkit in place of sdpa, and writes each outcome into a file.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

import dilkit
from dilkit.integrations.transformers import registration

TESTS, REASONS = Path(__file__).resolve().parents[1], Path(__file__).with_name("differences.json")
FAMILIES = (
    *("bart", "bert", "bloom", "clip", "gemma2", "gemma3", "gpt2", "gpt_neox", "llama", "mistral"),
    *("modernbert", "mpt", "opt", "phi", "qwen2", "stablelm", "t5", "vit", "whisper"),
)
SDPA, NAME = "sdpa", "dilkit"
OPTIONS = ("-q", "--tb=short", "-p", "no:cacheprovider", "-o", "log_cli=0", "-p", "families.own_tests", "--timeout=200")
SECONDS = 3600
"""The limit of one run of a family's tests."""
PASSED, SKIPPED, FAILED = WORSE = "passed", "skipped", "failed"
EQUAL, UNASKED, REFUSED, NAMED, WRONG, FAILS = VERDICTS = "equal", "no attention", "refused", "name", "wrong", "not counted"
"""It passes with both; without a call of dilkit; dilkit raised an error; it fails at the name of the attention; any other
difference, such as of numbers; it does not pass with sdpa."""
NAME_IN_FAILURE = re.compile(r"""attn_implementation|["']sdpa["']""")
PACKAGE = Path(dilkit.__file__).parent


@dataclass
class Outcome:
    """One test. `calls`: of dilkit's attention. `error`: exceptions of its failure; `refused`: a file of dilkit raised one."""

    test: str
    outcome: str = PASSED
    calls: int = 0
    error: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Reason:
    """Why tests differ. `tests` and `error` match within a test's name and its error."""

    verdict: str
    error: str
    reason: str
    tests: str = ""

    def explains(self, verdict: str, outcome: Outcome) -> bool:
        return verdict == self.verdict and bool(re.search(self.tests, outcome.test) and re.search(self.error, outcome.error))


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("checkout", type=Path, help="a checkout of transformers, with its src and tests")
    parser.add_argument("--only", default=",".join(FAMILIES), metavar="A,B", help="families, folders of tests/models")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    args, options = parser.parse_known_args()
    families, reasons = args.only.split(","), [Reason(**one) for one in json.loads(REASONS.read_text(encoding="utf-8"))]
    if missing := [name for name in families if not (args.checkout / "tests/models" / name).is_dir()]:
        parser.error(f"{args.checkout} has no tests/models/{missing[0]}; a checkout of transformers is needed")
    with ThreadPoolExecutor(args.jobs) as pool:
        calls = [(args.checkout.resolve(), name, attention, options) for name in families for attention in (SDPA, NAME)]
        runs = [*pool.map(run, *zip(*calls, strict=True))]
    both = {name: list(compared(*runs[2 * i : 2 * i + 2])) for i, name in enumerate(families)}
    counts = {name: Counter(kind for kind, _ in tests) for name, tests in both.items()}
    found = [one for tests in both.values() for one in differences(tests, reasons)]
    used = Counter(reason for *_, reason in found)
    failed = int(None in used or not all(row[EQUAL] for row in counts.values()))
    if args.json:
        named = [{"verdict": kind, **asdict(one), "reason": reason and reason.reason} for kind, one, reason in found]
        print(json.dumps({"counts": counts, "differences": named}, indent=1))
        return failed
    print("\n".join(table(counts)), *(f"{n:5} {one.verdict}: {one.reason}" for one, n in used.most_common() if one), sep="\n")
    print(*(f"no reason: {kind}: {one.test}: {one.error}" for kind, one, reason in found if reason is None), sep="\n")
    print(*(f"unused: {one.verdict}: {one.reason}" for one in reasons if one not in used), sep="\n")
    return failed


def run(checkout: Path, family: str, attention: str, options: list[str]) -> dict[str, Outcome]:
    paths = sorted(map(str, (checkout / "tests/models" / family).glob("test_modeling_*.py")))
    variables = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(checkout / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, "-m", "pytest", *OPTIONS, f"--attention={attention}", f"--outcomes={file.name}", *options]
        try:
            subprocess.run([*command, *paths], cwd=checkout, env=variables, stdout=sys.stderr, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{family} with {attention}: no end after {SECONDS} s", file=sys.stderr)
        return outcomes_of(Path(file.name))


def outcomes_of(file: Path) -> dict[str, Outcome]:
    return {one.test: one for one in (Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines())}


def compared(sdpa: Mapping[str, Outcome], dilkit: Mapping[str, Outcome]) -> Iterator[tuple[str, Outcome]]:
    for test, before in sdpa.items():
        outcome = dilkit.get(test, Outcome(test, "missing", error="the run ended before it"))
        yield verdict(before, outcome), outcome


def verdict(sdpa: Outcome, dilkit: Outcome) -> str:
    if sdpa.outcome != PASSED:
        return FAILS
    if dilkit.outcome == PASSED:
        return EQUAL if dilkit.calls else UNASKED
    return REFUSED if dilkit.refused else NAMED if NAME_IN_FAILURE.search(dilkit.error) else WRONG


def differences(tests: list[tuple[str, Outcome]], reasons: list[Reason]) -> Iterator[tuple[str, Outcome, Reason | None]]:
    for kind, outcome in tests:
        if kind in (REFUSED, NAMED, WRONG):
            yield kind, outcome, next((one for one in reasons if one.explains(kind, outcome)), None)


def table(counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield f"{'':12}" + "".join(f"{kind:>14}" for kind in VERDICTS)
    for name, row in [*counts.items(), ("all", sum(map(Counter, counts.values()), Counter[str]()))]:
        yield f"{name:12}" + "".join(f"{row.get(kind, 0):14}" for kind in VERDICTS)


def pytest_addoption(parser):
    group = parser.getgroup("dilkit")
    group.addoption("--attention", choices=[SDPA, NAME], default=NAME, help="the attention in the place of sdpa")
    group.addoption("--outcomes", type=Path, default=Path(os.devnull), help="the file that gets a line of JSON for each test")


def pytest_configure(config):
    file = config.getoption("outcomes").open("w", encoding="utf-8", buffering=1)
    config.add_cleanup(file.close)
    if config.getoption("attention") == NAME:
        swap = swapped()
        swap.__enter__()
        config.add_cleanup(lambda: swap.__exit__(None, None, None))
    config.pluginmanager.register(_Recorder(file))


_calls = Counter()


@contextmanager
def swapped() -> Iterator[None]:
    """Register dilkit's attention, by the own pattern of each layer, and choose it in place of sdpa and of the default."""
    package, attend = registration.transformers(), registration.attend

    def counted(*args, **kwargs):
        if not torch.compiler.is_compiling():
            _calls[NAME] += 1
        return attend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "attend", counted)  # also what `is_registered` compares with
        registration.register(None, NAME)
        decide = package.PreTrainedModel.get_correct_attn_implementation

        def decided(model, requested, *args, **kwargs):
            name = decide(model, requested, *args, **kwargs)
            if requested is not None and name != SDPA:
                return name
            return decide(model, NAME)

        patch.setattr(package.PreTrainedModel, "get_correct_attn_implementation", decided)
        yield


class _Recorder:
    def __init__(self, file):
        self.file, self.outcome = file, Outcome("")

    def pytest_runtest_logstart(self, nodeid: str):
        self.outcome = Outcome(nodeid)
        _calls.clear()
        random.seed(0)  # the same in both runs, and of transformers' generator for inputs too
        torch.manual_seed(0)
        for name, module in list(sys.modules.items()):
            if name.endswith("test_modeling_common"):
                module.global_rng.seed(0)

    def pytest_runtest_logreport(self, report):
        outcome = max(self.outcome.outcome, report.outcome, key=WORSE.index)
        if outcome == self.outcome.outcome or (outcome == SKIPPED and hasattr(report, "context")):  # other subtests may pass
            return
        self.outcome.outcome = outcome
        self.outcome.error, self.outcome.refused = _error(report.longrepr)

    def pytest_runtest_logfinish(self):
        self.outcome.calls = _calls[NAME]
        print(json.dumps(asdict(self.outcome)), file=self.file)


def _error(longrepr) -> tuple[str, bool]:
    """Return the exceptions' messages, with the last raising line, and whether dilkit raised one."""
    chain = getattr(longrepr, "chain", ())
    crashes = [crash for _, crash, _ in chain if crash is not None]
    if not crashes:
        return str(longrepr), False
    messages = [" ".join(crash.message.split())[:500] for crash in reversed(crashes)]
    lines = (line.strip("> ^") for line in reversed(chain[-1][0].reprentries[-1].lines) if not line.startswith("E"))
    return f"{' <- '.join(messages)} [{next(filter(None, lines))}]", any(PACKAGE in Path(crash.path).parents for crash in crashes)


if __name__ == "__main__":
    sys.exit(main())
