"""Dilated attention for very long sequences: exact, on whatever hardware there is.

Names are loaded at first use, so that `import dilkit` stays light and works where torch is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_HOMES = {
    "Alibi": "bias.alibi",
    "Backend": "backend",
    "BlockSparse": "pattern",
    "Branch": "pattern",
    "CoordinateAlibi": "bias.alibi",
    "Device": "device",
    "DilatedAttention": "nn",
    "DilatedCache": "decoding",
    "DilatedSegment": "pattern",
    "Documents": "pattern",
    "GlobalTokens": "pattern",
    "GridTable": "bias.tables",
    "Inputs": "inputs",
    "Intervals": "pattern",
    "Limits": "backend",
    "LocalityReport": "orders.locality",
    "MultiheadDilatedAttention": "nn",
    "Neighborhood": "pattern",
    "NoBackendError": "selector",
    "PagedCache": "decoding",
    "Pattern": "pattern",
    "PatternError": "pattern",
    "PoolFullError": "decoding",
    "Prefix": "pattern",
    "Problem": "problem",
    "Refusal": "backend",
    "RelativeTable": "bias.tables",
    "SlidingWindow": "pattern",
    "Strided": "pattern",
    "TokenOrder": "orders.token_order",
    "alibi_slopes": "bias.alibi",
    "attention_mass": "weights",
    "attention_rows": "weights",
    "dilated_attention": "attention",
    "dilated_attention_varlen": "packed.attention",
    "dilated_attention_with_kvcache": "decoding.kvcache",
    "explain": "selector",
    "list_backends": "registry",
    "locality_report": "orders.locality",
    "order": "orders.token_order",
    "ordered_dilated_attention": "orders.attention",
    "register_backend": "registry",
    "register_kind": "pattern",
    "sort_points": "orders.points",
    "t5_buckets": "bias.tables",
    "unregister_backend": "registry",
    "use_backend": "selector",
}
_MODULES = {
    **{name: name for name in ("attention", "backend", "device", "environment", "nn", "oracle", "orders", "pattern", "plan")},
    **{name: name for name in ("problem", "registry", "selector")},
    "locality": "orders.locality",
    "points": "orders.points",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from dilkit.attention import dilated_attention as dilated_attention
    from dilkit.backend import Backend as Backend
    from dilkit.backend import Limits as Limits
    from dilkit.backend import Refusal as Refusal
    from dilkit.bias.alibi import Alibi as Alibi
    from dilkit.bias.alibi import CoordinateAlibi as CoordinateAlibi
    from dilkit.bias.alibi import alibi_slopes as alibi_slopes
    from dilkit.bias.tables import GridTable as GridTable
    from dilkit.bias.tables import RelativeTable as RelativeTable
    from dilkit.bias.tables import t5_buckets as t5_buckets
    from dilkit.decoding import DilatedCache as DilatedCache
    from dilkit.decoding import PagedCache as PagedCache
    from dilkit.decoding import PoolFullError as PoolFullError
    from dilkit.decoding.kvcache import dilated_attention_with_kvcache as dilated_attention_with_kvcache
    from dilkit.device import Device as Device
    from dilkit.inputs import Inputs as Inputs
    from dilkit.nn import DilatedAttention as DilatedAttention
    from dilkit.nn import MultiheadDilatedAttention as MultiheadDilatedAttention
    from dilkit.orders.attention import ordered_dilated_attention as ordered_dilated_attention
    from dilkit.orders.locality import LocalityReport as LocalityReport
    from dilkit.orders.locality import locality_report as locality_report
    from dilkit.orders.points import sort_points as sort_points
    from dilkit.orders.token_order import TokenOrder as TokenOrder
    from dilkit.orders.token_order import order as order
    from dilkit.packed.attention import dilated_attention_varlen as dilated_attention_varlen
    from dilkit.pattern import BlockSparse as BlockSparse
    from dilkit.pattern import Branch as Branch
    from dilkit.pattern import DilatedSegment as DilatedSegment
    from dilkit.pattern import Documents as Documents
    from dilkit.pattern import GlobalTokens as GlobalTokens
    from dilkit.pattern import Intervals as Intervals
    from dilkit.pattern import Neighborhood as Neighborhood
    from dilkit.pattern import Pattern as Pattern
    from dilkit.pattern import PatternError as PatternError
    from dilkit.pattern import Prefix as Prefix
    from dilkit.pattern import SlidingWindow as SlidingWindow
    from dilkit.pattern import Strided as Strided
    from dilkit.pattern import register_kind as register_kind
    from dilkit.problem import Problem as Problem
    from dilkit.registry import list_backends as list_backends
    from dilkit.registry import register_backend as register_backend
    from dilkit.registry import unregister_backend as unregister_backend
    from dilkit.selector import NoBackendError as NoBackendError
    from dilkit.selector import explain as explain
    from dilkit.selector import use_backend as use_backend
    from dilkit.weights import attention_mass as attention_mass
    from dilkit.weights import attention_rows as attention_rows


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"dilkit.{_HOMES[name]}"), name)
    elif name in _MODULES:
        return importlib.import_module(f"dilkit.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'dilkit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
