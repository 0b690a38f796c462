"""The proof of steps of decoding: small caches whose steps a backend computes, beside the same by the definition.

prompt --reference--> cache of the backend  --its steps--> rows --+
       --reference--> cache of `reference`  --its steps--> rows --+--> what is wrong
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.alibi import CoordinateAlibi
from dilkit.bias.base import Bias
from dilkit.bias.form import BiasForm
from dilkit.decoding import DilatedCache, PagedCache
from dilkit.pattern import DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.testing.biases import made_bias

PATTERNS = {
    "segments": Pattern([32, 128], [1, 4]),
    "kinds": Pattern.of(DilatedSegment(64, 2), SlidingWindow(40, 2), Strided(7), GlobalTokens([0, 3, 77], "read")),
    "once": Pattern.of(SlidingWindow(60, 2), SlidingWindow(40), GlobalTokens(3, "read"), overlap="once"),
}
PROMPT, STEPS, KV_HEADS, BATCH = 150, 5, 2, 2
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""The largest difference of results, of numbers about 1, by dtype."""


@dataclass(frozen=True)
class StepProof:
    """The options of a proof of steps: dtypes of rows and stored rows, query heads of each key/value head, softcap, bias."""

    backend: str
    device: str
    dtype: str
    stored: str
    head_dim: int
    group: int
    softcap: bool
    bias: BiasForm | None

    def complaints(self) -> Iterator[str]:
        """Yield the faults of each kind of cache. A `PagedCache` keeps no coordinates."""
        kinds = {"": self._of_a_batch}
        if self.bias is None or not self.bias.placed:
            kinds["paged "] = self._of_pages
        for (name, pattern), (kind, steps) in product(PATTERNS.items(), kinds.items()):
            ours, right = (steps(pattern, backend) for backend in (self.backend, "reference"))
            error = float((ours.double() - right.double()).abs().max())
            if not error <= LIMITS[self.dtype]:
                yield f"{kind}steps, {name}: off by {error:.3g}"

    def _of_a_batch(self, pattern: Pattern, backend: str) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        cache = DilatedCache(pattern, kv_heads=KV_HEADS, stored=self._stored)
        bias, rows = self._bias(draw), self._rows(draw, BATCH, PROMPT + STEPS)
        outs = []
        for start, stop in pairwise((0, *range(PROMPT, PROMPT + STEPS + 1))):
            so_far = replace(bias, coordinates=bias.coordinates[:, :stop]) if isinstance(bias, CoordinateAlibi) else bias
            options = self._options(so_far)
            outs.append(cache.attend(*(x[:, start:stop] for x in rows), backend=backend if start else "reference", **options))
        return torch.cat(outs[1:], 1)

    def _of_pages(self, pattern: Pattern, backend: str) -> Tensor:
        """Compute steps of two sequences of different lengths, one of each together."""
        draw = torch.Generator().manual_seed(1)
        sizes = KV_HEADS * self.group, KV_HEADS, self.head_dim
        where: dict[str, Any] = dict(dtype=getattr(torch, self.dtype), device=self.device, stored=self._stored)
        cache = PagedCache(pattern, *sizes, nbytes=1 << 23, page_rows=8, **where)
        sequences, options = [cache.add(), cache.add()], self._options(self._bias(draw))
        start = PROMPT + 40
        q, k, v = (x[0] for x in self._rows(draw, 1, start + 2 * STEPS))
        cache.attend(q[:start], k[:start], v[:start], sequences, [PROMPT, 40], backend="reference", **options)
        steps = (slice(row, row + 2) for row in range(start, start + 2 * STEPS, 2))
        return torch.cat([cache.attend(q[rows], k[rows], v[rows], sequences, backend=backend, **options) for rows in steps])

    @property
    def _stored(self) -> str | None:
        """The argument `stored` of a cache."""
        return None if self.stored == self.dtype else self.stored

    def _bias(self, draw: torch.Generator) -> Bias | None:
        if self.bias is None:
            return None
        return made_bias(self.bias, KV_HEADS * self.group, BATCH, PROMPT + STEPS, draw, self.device)

    def _options(self, bias: Bias | None) -> dict[str, Any]:
        return dict(bias=bias, softcap=1.5 if self.softcap else None)

    def _rows(self, draw: torch.Generator, batch: int, seq: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = KV_HEADS * self.group, KV_HEADS, KV_HEADS
        make = partial(torch.randn, generator=draw)
        q, k, v = (make(batch, seq, n, self.head_dim).to(self.device, getattr(torch, self.dtype)) for n in heads)
        return q, k, v
