"""The suites of `dilkit bench --suite NAME`, found without importing them."""

from __future__ import annotations

import importlib

from dilkit.tools.bench.suite import Suite

SUITES = {
    "cpu": "dilkit.tools.bench.cpu:CpuSuite",
    "gpu": "dilkit.tools.bench.gpu:GpuSuite",
    "hosts": "dilkit.tools.bench.hosts:HostsSuite",
    "orders": "dilkit.tools.bench.orders:OrdersSuite",
    "patterns": "dilkit.tools.bench.patterns:PatternsSuite",
    "preferences": "dilkit.tools.bench.preferences:PreferencesSuite",
    "ring": "dilkit.tools.bench.ring:RingSuite",
    "scores": "dilkit.tools.bench.scores:ScoresSuite",
    "seeds": "dilkit.tools.bench.seeds:SeedsSuite",
    "serving": "dilkit.tools.bench.serving:ServingSuite",
    "slides": "dilkit.tools.bench.slides:SlidesSuite",
}
"""Where the class of each is."""


def suite(name: str) -> type[Suite]:
    """The suite of this name."""
    module, _, kind = SUITES[name].partition(":")
    cls: type[Suite] = getattr(importlib.import_module(module), kind)
    return cls
