"""Dilated attention for very long sequences: exact, on whatever hardware there is.

Names are loaded at first use, so that `import dilkit` stays light and works where torch is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Backend": "backend",
    "Device": "device",
    "DilatedAttention": "nn",
    "DilatedSegment": "pattern",
    "Limits": "backend",
    "LocalityReport": "locality",
    "MultiheadDilatedAttention": "nn",
    "NoBackendError": "selector",
    "Pattern": "pattern",
    "PatternError": "pattern_checks",
    "Problem": "problem",
    "Refusal": "backend",
    "TokenOrder": "orders",
    "dilated_attention": "attention",
    "explain": "selector",
    "list_backends": "registry",
    "locality_report": "locality",
    "order": "orders",
    "ordered_dilated_attention": "ordered",
    "register_backend": "registry",
    "sort_points": "points",
    "unregister_backend": "registry",
    "use_backend": "selector",
}
_MODULES = (
    "attention",
    "backend",
    "device",
    "environment",
    "locality",
    "nn",
    "oracle",
    "orders",
    "pattern",
    "plan",
    "points",
    "problem",
    "registry",
    "selector",
)

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from dilkit.attention import dilated_attention as dilated_attention
    from dilkit.backend import Backend as Backend
    from dilkit.backend import Limits as Limits
    from dilkit.backend import Refusal as Refusal
    from dilkit.device import Device as Device
    from dilkit.locality import LocalityReport as LocalityReport
    from dilkit.locality import locality_report as locality_report
    from dilkit.nn import DilatedAttention as DilatedAttention
    from dilkit.nn import MultiheadDilatedAttention as MultiheadDilatedAttention
    from dilkit.ordered import ordered_dilated_attention as ordered_dilated_attention
    from dilkit.orders import TokenOrder as TokenOrder
    from dilkit.orders import order as order
    from dilkit.pattern import DilatedSegment as DilatedSegment
    from dilkit.pattern import Pattern as Pattern
    from dilkit.pattern_checks import PatternError as PatternError
    from dilkit.points import sort_points as sort_points
    from dilkit.problem import Problem as Problem
    from dilkit.registry import list_backends as list_backends
    from dilkit.registry import register_backend as register_backend
    from dilkit.registry import unregister_backend as unregister_backend
    from dilkit.selector import NoBackendError as NoBackendError
    from dilkit.selector import explain as explain
    from dilkit.selector import use_backend as use_backend


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"dilkit.{_HOMES[name]}"), name)
    elif name in _MODULES:
        return importlib.import_module(f"dilkit.{name}")
    else:
        raise AttributeError(f"module 'dilkit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
