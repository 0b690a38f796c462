"""Rows of several sequences that see none before them, computed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from dilkit.decoding.layout import Layout
from dilkit.decoding.paged.call import Rows
from dilkit.decoding.stored import decoded, encoded
from dilkit.op.boundary import lse_dtype
from dilkit.packed.attention import dilated_attention_varlen
from dilkit.pattern import Pattern


def attend_prompts(
    prompts: Sequence[slice], rows: Rows, out: Tensor, pattern: Pattern, layout: Layout, options: dict[str, Any]
) -> None:
    """Write into `out` what the rows of each prompt get, a slice of `rows`, as if keys and values had been stored."""
    query, key, value = (torch.cat([x[own] for own in prompts]) for x in rows)
    if layout.stored != layout.dtype:
        wide = lse_dtype(query.dtype)
        query, key, value = query.to(wide), *(decoded(encoded(x, layout.stored), wide) for x in (key, value))
    ends = list(accumulate((own.stop - own.start for own in prompts), initial=0))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=query.device)
    computed = cast(Tensor, dilated_attention_varlen(query, key, value, pattern, cu_seqlens, is_causal=True, **options))
    for own, start in zip(prompts, ends, strict=False):
        out[own] = computed[start : start + own.stop - own.start]
