"""The suites of `dilkit bench --suite NAME`, found without importing them.

A further suite is a file of this folder, such as windows.py, and a line here. The file has sizes, targets, a `REPORT`, and a
`Suite`, whose steps return rows: patterns.py is a model with bars, serving.py has lines over tokens. Cases are compared by
`dilkit.tools.measure.case.compare`, and on native by `workloads.ways`. Tests then ask for its result and for current pages: `make
results ARGS=windows`, `make docs`.
"""

from __future__ import annotations

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
    """The suite of this name."""
    cls: type[Suite] = getattr(importlib.import_module(f"dilkit.tools.bench.suites.{name}"), SUITES[name])
    return cls
