"""Problems as values: what they work out from their fields follows the fields."""

import pickle
from dataclasses import asdict, replace

from dilkit import Pattern, Problem

PROBLEM = Problem(pattern=Pattern([8, 16], [1, 2]), seq=32, heads=4, head_dim=8)


def test_flops_are_those_of_the_pattern():
    assert PROBLEM.flops() == PROBLEM.flops() == PROBLEM.pattern.flops(32, 4, 8)


def test_a_changed_copy_has_flops_of_its_own():
    PROBLEM.flops()
    assert replace(PROBLEM, batch=3).flops() == 3 * PROBLEM.flops()
    assert replace(PROBLEM, is_causal=True).flops() < PROBLEM.flops()


def test_what_was_asked_before_makes_no_difference():
    fresh = replace(PROBLEM)
    PROBLEM.flops()
    assert fresh == PROBLEM
    assert hash(PROBLEM) == hash(fresh)
    assert asdict(PROBLEM) == asdict(fresh)
    assert pickle.loads(pickle.dumps(PROBLEM)) == fresh
