"""`dilkit verify` on the device, group by group."""

from collections import Counter
from collections.abc import Callable

import pytest

from dilkit import registry
from dilkit.selection.proving import cases
from dilkit.testing.conformance import check, repeats_that_differ
from dilkit.testing.problems import LARGE
from dilkit.tools.commands.verify import LISTED, REPEATED, REPEATS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170, method="thread")]


def groups():
    by_name = {f"large {i // 5}": LARGE[i : i + 5] for i in range(0, len(LARGE), 5)}
    for feature, count in Counter(case.feature for case in LISTED).most_common():
        cases = [case for case in LISTED if case.feature == feature]
        by_name |= {f"{feature} {i // 48}": cases[i : i + 48] for i in range(0, count, 48)}
    return by_name


GROUPS = groups()
REHEARSED = ("causal 0", "packed 2")
Note = Callable[..., None]


@pytest.mark.parametrize("group", GROUPS)
def test_the_problem_list(backends, group, device, rehearsal, note):
    if rehearsal and group not in REHEARSED:
        pytest.skip("a rehearsal")
    judge(backends, GROUPS[group], group, device, note)


@pytest.mark.parametrize("compiler", ["numba_cuda", "flex"])
@pytest.mark.parametrize("part", range(24))
def test_some_problems_of_compilers(compiler, part, device, rehearsal, note):
    """They compile again for every kind of problem, so that they get a choice of them."""
    if rehearsal:
        pytest.skip("a rehearsal")
    judge([compiler], LISTED[part::240], f"a choice, {part}", device, note)


@pytest.mark.parametrize("head_dim", [160, 192, 256])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_wide_heads(half, head_dim, device, rehearsal, note):
    chosen = ["sdpa"] if rehearsal else ["sdpa", "sdpa:cudnn", "sdpa:flash"]
    judge(chosen, [*cases(half, head_dim, gradients=True)][: 1 if rehearsal else None], f"head_dim {head_dim}", device, note)


def judge(backends, chosen, group, device, note):
    """Check backends on these cases, note the worst error of each, and skip if none computes any of them."""
    results = [check(backend, case, device) for case in chosen for backend in backends]  # they share the oracle's results
    wrong = [result for result in results if result.verdict in ("failed", "broken")]
    for backend in backends:
        right = [result for result in results if result.backend == backend and result.verdict == "passed"]
        count = sum(result.backend == backend for result in wrong)
        worst = max((result.worst for result in right if result.ratios), default=0.0)
        text = f"{len(right)} right, {count} wrong; the worst error that is right is {worst:.2f} of plain torch's"
        if right or count:
            note(f"verify {backend}, {group}", text, wrong=float(count), passed=float(len(right)))
    if wrong:
        pytest.fail("; ".join(f"{result.backend}, {result.case.name}: {', '.join(result.reasons)}" for result in wrong))
    if not any(result.verdict == "passed" for result in results):
        pytest.skip("; ".join(results[0].reasons))


@pytest.mark.parametrize("case", [case for case in LARGE if case.variant in REPEATED], ids=lambda case: case.name)
def test_large_cases_have_the_same_bits_every_time(backends, case, device, rehearsal):
    """Cases that a backend gets wrong are left out: they have failed already."""
    known = registry.backends()
    promised = [name for name in backends if getattr(known[name], "reproducible", False)]
    if rehearsal or not promised:
        pytest.skip("a rehearsal" if rehearsal else "none of them promises equal bits")
    right = [name for name in promised if check(name, case, device).verdict == "passed"]
    assert not [name for name in right if repeats_that_differ(name, case, device, REPEATS)]
