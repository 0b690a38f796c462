"""Bounds that follow from what kernels issue."""

import pytest

from dilkit.tools.bench.suites.costs import CARDS, bound_of, seconds

A100 = next(card for card in CARDS if card.name == "A100")
ISSUED = dict(products=2**24, matrices=2**24, shared=2**23, shuffles=10, fma=10**6, fp32=10**6, special=2**27, memory=10**9)


def test_a_launch_needs_what_its_busiest_unit_needs():
    bound, cycles = bound_of(ISSUED, A100), 108 * 1.41e9
    assert bound["tensor"] == pytest.approx(2**24 * 4096 / 312e12)
    assert bound["shared"] == pytest.approx(3 * 2**23 / cycles, rel=0.01)
    assert bound["special"] == pytest.approx(2**27 / 16 / cycles, rel=0.01)
    assert bound["memory"] == pytest.approx(1e9 / 1555e9)
    assert seconds([bound]) == bound["memory"]
    assert seconds([bound, dict(tensor=1.0)]) == 1.0 + bound["memory"]
