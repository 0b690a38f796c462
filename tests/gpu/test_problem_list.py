"""`dilkit verify` on the device, group by group: the problem list and large cases, which are computed again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from dilkit import registry
from dilkit.testing.conformance import check, repeats_that_differ
from dilkit.testing.problems import LARGE, Case
from dilkit.tools.commands.verify import LISTED, REPEATED, REPEATS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170, method="thread")]


def groups() -> dict[str, Sequence[Case]]:
    """Return the cases in groups, those that take longest first. The oracle, on the CPU, is what takes the time."""
    by_name: dict[str, Sequence[Case]] = {f"large {i // 5}": LARGE[i : i + 5] for i in range(0, len(LARGE), 5)}
    for feature, count in Counter(case.feature for case in LISTED).most_common():
        cases = [case for case in LISTED if case.feature == feature]
        by_name |= {f"{feature} {i // 48}": cases[i : i + 48] for i in range(0, count, 48)}
    return by_name


GROUPS = groups()
REHEARSED = ("causal 0", "packed 2")


@pytest.mark.parametrize("group", GROUPS)
def test_the_problem_list(any_backend: str, group: str, device: str, rehearsal: bool, note: Callable[..., None]) -> None:
    if rehearsal and group not in REHEARSED:
        pytest.skip("a rehearsal")
    judge(any_backend, GROUPS[group], group, device, note)


def test_some_problems_of_the_compiler(device: str, rehearsal: bool, note: Callable[..., None]) -> None:
    """FlexAttention is compiled anew for every problem, so that it gets a choice of them."""
    if rehearsal:
        pytest.skip("a rehearsal")
    judge("flex", LISTED[::40], "a choice", device, note)


def judge(backend: str, cases: Sequence[Case], group: str, device: str, note: Callable[..., None]) -> None:
    """Check a backend on these cases, note the worst error, and skip if it computes none of them."""
    results = [check(backend, case, device) for case in cases]
    wrong = [f"{result.case.name}: {'; '.join(result.reasons)}" for result in results if result.verdict in ("failed", "broken")]
    passed = [result for result in results if result.verdict == "passed"]
    if passed or wrong:
        worst = max((result.worst for result in passed if result.ratios), default=0.0)
        text = f"{len(passed)} right, {len(wrong)} wrong; the worst error that is right is {worst:.2f} of plain torch's"
        note(f"verify {backend}, {group}", text, wrong=float(len(wrong)), passed=float(len(passed)))
    assert not wrong
    if not passed:
        pytest.skip("; ".join(results[0].reasons))


@pytest.mark.parametrize("case", [case for case in LARGE if case.variant in REPEATED], ids=lambda case: case.name)
def test_large_cases_have_the_same_bits_every_time(any_backend: str, case: Case, device: str, rehearsal: bool) -> None:
    if not getattr(registry.backends()[any_backend], "reproducible", False):
        pytest.skip("promises no equal bits")
    if rehearsal:
        pytest.skip("a rehearsal")
    if check(any_backend, case, device).verdict != "passed":
        pytest.skip("refused, or wrong: the problem list says which")
    assert repeats_that_differ(any_backend, case, device, REPEATS) == 0
