"""The suites of `dilkit bench --suite NAME`, found without importing them; docs/design.md says what a further one takes."""

import importlib

from dilkit.tools.bench.suite import Suite

SUITES = {
    "seeds": "SeedsSuite",
    "cpu": "CpuSuite",
    "gpu": "GpuSuite",
    "preferences": "PreferencesSuite",
    "ring": "RingSuite",
    "hosts": "HostsSuite",
    "orders": "OrdersSuite",
    "slides": "SlidesSuite",
    "serving": "ServingSuite",
    "patterns": "PatternsSuite",
    "scores": "ScoresSuite",
}
"""The class of each, in the module of its name, in the order of docs/measurements.md."""


def suite(name: str) -> type[Suite]:
    cls: type[Suite] = getattr(importlib.import_module(f"dilkit.tools.bench.suites.{name}"), SUITES[name])
    return cls
