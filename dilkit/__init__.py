"""Dilated attention for very long sequences: exact, on whatever hardware there is.

Names are loaded at first use, so that `import dilkit` stays light and works where torch is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

__version__ = "0.3.0"

_NAMES = {
    "attention": "dilated_attention",
    "backend": "Backend Limits Refusal",
    "bias.alibi": "Alibi CoordinateAlibi alibi_slopes",
    "bias.rows": "RowTable",
    "bias.tables": "CoordinateTable GridTable RelativeTable t5_buckets",
    "decoding": "DilatedCache PagedCache PoolFullError",
    "decoding.kvcache": "dilated_attention_with_kvcache",
    "device": "Device",
    "inputs": "Inputs",
    "nn": "DilatedAttention MultiheadDilatedAttention",
    "orders.attention": "ordered_dilated_attention",
    "orders.locality": "LocalityReport locality_report",
    "orders.points": "sort_points",
    "orders.token_order": "TokenOrder order",
    "packed.attention": "dilated_attention_varlen",
    "pattern": "BlockSparse Branch DilatedSegment Documents GlobalTokens Intervals Neighborhood "
    "Pattern PatternError Prefix SlidingWindow Strided register_kind",
    "problem": "Problem",
    "registry": "list_backends register_backend unregister_backend",
    "selector": "NoBackendError explain use_backend",
    "weights": "attention_mass attention_rows",
}

_MODULES = {
    **{name: name for name in ("attention", "backend", "device", "environment", "nn", "oracle", "orders", "pattern", "plan")},
    **{name: name for name in ("problem", "registry", "selector")},
    **{name: f"orders.{name}" for name in ("locality", "points")},
}

__all__ = [*sorted(" ".join(_NAMES.values()).split()), "__version__"]

if TYPE_CHECKING:
    from dilkit.attention import dilated_attention as dilated_attention
    from dilkit.backend import Backend as Backend, Limits as Limits, Refusal as Refusal
    from dilkit.bias.alibi import Alibi as Alibi, CoordinateAlibi as CoordinateAlibi, alibi_slopes as alibi_slopes
    from dilkit.bias.rows import RowTable as RowTable
    from dilkit.bias.tables import (
        CoordinateTable as CoordinateTable,
        GridTable as GridTable,
        RelativeTable as RelativeTable,
        t5_buckets as t5_buckets,
    )
    from dilkit.decoding import DilatedCache as DilatedCache, PagedCache as PagedCache, PoolFullError as PoolFullError
    from dilkit.decoding.kvcache import dilated_attention_with_kvcache as dilated_attention_with_kvcache
    from dilkit.device import Device as Device
    from dilkit.inputs import Inputs as Inputs
    from dilkit.nn import DilatedAttention as DilatedAttention, MultiheadDilatedAttention as MultiheadDilatedAttention
    from dilkit.orders.attention import ordered_dilated_attention as ordered_dilated_attention
    from dilkit.orders.locality import LocalityReport as LocalityReport, locality_report as locality_report
    from dilkit.orders.points import sort_points as sort_points
    from dilkit.orders.token_order import TokenOrder as TokenOrder, order as order
    from dilkit.packed.attention import dilated_attention_varlen as dilated_attention_varlen
    from dilkit.pattern import (
        BlockSparse as BlockSparse,
        Branch as Branch,
        DilatedSegment as DilatedSegment,
        Documents as Documents,
        GlobalTokens as GlobalTokens,
        Intervals as Intervals,
        Neighborhood as Neighborhood,
        Pattern as Pattern,
        PatternError as PatternError,
        Prefix as Prefix,
        SlidingWindow as SlidingWindow,
        Strided as Strided,
        register_kind as register_kind,
    )
    from dilkit.problem import Problem as Problem
    from dilkit.registry import (
        list_backends as list_backends,
        register_backend as register_backend,
        unregister_backend as unregister_backend,
    )
    from dilkit.selector import NoBackendError as NoBackendError, explain as explain, use_backend as use_backend
    from dilkit.weights import attention_mass as attention_mass, attention_rows as attention_rows

__getattr__, __dir__ = lazy_names(__name__, _NAMES, _MODULES)
