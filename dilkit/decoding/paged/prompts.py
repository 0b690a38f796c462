"""Rows of several sequences that see none before them, computed together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dilkit.decoding.layout import Layout
from dilkit.decoding.paged.call import Call, Rows
from dilkit.decoding.stored import decoded, encoded
from dilkit.op.arguments import encode_arguments, further_arguments
from dilkit.op.boundary import lse_dtype
from dilkit.op.operators import attend
from dilkit.pattern import Pattern


class Prompt(NamedTuple):
    """The rows of one sequence in a call, and the token of the first of them."""

    rows: slice
    token: int = 0


def attend_prompts(prompts: Sequence[Prompt], rows: Rows, out: Tensor, pattern: Pattern, layout: Layout, call: Call) -> None:
    """Write into `out` what the rows of each prompt get, as if keys and values had been stored."""
    query, key, value = (torch.cat([x[prompt.rows] for prompt in prompts])[None] for x in rows)
    if layout.stored != layout.dtype:
        wide = lse_dtype(query.dtype)
        query, key, value = query.to(wide), *(decoded(encoded(x, layout.stored), wide) for x in (key, value))
    counts = [prompt.rows.stop - prompt.rows.start for prompt in prompts]
    cu_seqlens = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=query.device)
    spans = [(prompt.token, prompt.token + count) for prompt, count in zip(prompts, counts, strict=True)]
    scores = call.scores.of_rows(torch.cat([torch.arange(*span, device=query.device) for span in spans]))
    scale, text = encode_arguments(query, key, value, pattern, True, call.problem.scale, call.asked, scores=scores)
    further = further_arguments(0.0, cu_seqlens, None, scores)
    computed = attend(query, key, value, None, scale, text, call.sink, *further)[0][0]
    for prompt, part in zip(prompts, torch.split(computed, counts), strict=True):
        out[prompt.rows] = part
