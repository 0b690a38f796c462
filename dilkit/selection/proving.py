"""`python -m dilkit.selection.proving REQUEST`: compute the cases of a proof, and print the faults; nothing if all was right.

REQUEST is JSON: backend, device, dtype, head_dim, gradients, varlen, dropout, kinds, softcap, bias, stored, group; with a dtype
of stored rows it is for steps of decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from dilkit import environment
from dilkit.bias.alibi import CoordinateAlibi
from dilkit.bias.base import Bias
from dilkit.bias.form import BiasForm
from dilkit.decoding import DilatedCache, PagedCache
from dilkit.pattern import BlockSparse, DilatedSegment, Documents, GlobalTokens, Pattern, Prefix, SlidingWindow, Strided
from dilkit.testing.bias_forms import form_like
from dilkit.testing.biases import made_bias
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

NESTED = Pattern([32, 64, 128], [1, 2, 4])
RAGGED = Pattern([100, 150, 330], [1, 3, 5])
ONCE = Pattern([16, 48, 96], [1, 2, 6], overlap="once")
KINDS = Pattern.of(
    DilatedSegment(64, 2),
    SlidingWindow(90),
    SlidingWindow(100, 3),
    Strided(37),
    GlobalTokens([0, 1, 77, 200]),
    GlobalTokens(2, "read"),
)
RUNS = Pattern.of(BlockSparse.bigbird(13, 40, heads=4), Documents([33, 200, 40, 250]), Prefix(70))
KINDS_ONCE = Pattern.of(SlidingWindow(150, 2), SlidingWindow(40), GlobalTokens([0, 1, 77], heads=(1, 4)), overlap="once")


def cases(
    dtype: str,
    head_dim: int,
    gradients: bool,
    varlen: bool = False,
    dropout: bool = False,
    kinds: bool = False,
    softcap: bool = False,
    bias: BiasForm | None = None,
) -> Iterator[Case]:
    """Yield a few problems with every feature that kernels are used with: each takes a GPU less than a millisecond.

    `kinds`: with branches of other kinds than segments, too. `bias`: with one that is computed by the same code.
    """
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, gradients=gradients)
    sizes |= dict(bias=form_like(bias)) if bias else {}
    sizes |= dict(dropout_p=0.3) if dropout else {}
    sizes |= dict(softcap=1.5) if softcap else {}
    if varlen:
        yield Case(feature="proof", variant="packed", pattern=NESTED, seq=501, batch=1, lengths=(200, 0, 1, 300), **sizes)
        yield Case(
            feature="proof", variant="packed causal", pattern=RAGGED, seq=420, batch=1, lengths=(7, 413), is_causal=True, **sizes
        )
        if kinds:
            for variant, pattern in (("packed kinds", KINDS), ("packed runs", RUNS)):
                yield Case(feature="proof", variant=variant, pattern=pattern, seq=420, batch=1, lengths=(7, 0, 413), **sizes)
        return
    yield Case(feature="proof", variant="full", pattern=NESTED, seq=500, **sizes)
    yield Case(feature="proof", variant="causal", pattern=RAGGED, seq=333, is_causal=True, **sizes)
    yield Case(feature="proof", variant="mask", pattern=RAGGED, seq=257, mask="random", **sizes)
    yield Case(feature="proof", variant="causal mask", pattern=NESTED, seq=130, is_causal=True, mask="left", **sizes)
    yield Case(feature="proof", variant="once, strided", pattern=ONCE, seq=200, layout="sliced", **sizes)
    many = sizes | dict(heads=32, kv_heads=16, batch=16)  # enough tiles for those kernels that are chosen by how many there are
    yield Case(feature="proof", variant="many tiles", pattern=Pattern([128], [1]), seq=128, **many)
    if kinds:
        yield Case(feature="proof", variant="kinds", pattern=KINDS, seq=500, **sizes)
        yield Case(feature="proof", variant="kinds causal", pattern=KINDS, seq=333, is_causal=True, mask="random", **sizes)
        yield Case(feature="proof", variant="kinds once", pattern=KINDS_ONCE, seq=300, layout="sliced", **sizes)
        yield Case(feature="proof", variant="runs", pattern=RUNS, seq=500, mask="random", **sizes)
        yield Case(feature="proof", variant="runs causal", pattern=RUNS, seq=333, is_causal=True, **sizes)


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


def main(request: str) -> int:
    """Print the faults of cases or decoding steps that are not right, or that none was computed."""
    options = json.loads(request)
    options["bias"] = BiasForm.decode(options["bias"]) if options["bias"] else None
    with environment.without_proofs():
        if options["stored"]:  # a backend that refuses steps raises
            steps = ("backend", "device", "dtype", "stored", "head_dim", "group", "softcap", "bias")
            wrong, nothing = [*StepProof(**{name: options[name] for name in steps}).complaints()], ""
        else:
            features = ("dtype", "head_dim", "gradients", "varlen", "dropout", "kinds", "softcap", "bias")
            chosen = cases(**{name: options[name] for name in features})
            results = [check(options["backend"], case, options["device"]) for case in chosen]
            wrong = [f"{r.case.variant}: {'; '.join(r.reasons)}" for r in results if r.verdict in ("failed", "broken")]
            nothing = "" if any(r.verdict != "refused" for r in results) else "; ".join(results[0].reasons)
    if wrong or nothing:
        print(f"computed wrongly: {' | '.join(wrong)}" if wrong else f"computed nothing: {nothing}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
