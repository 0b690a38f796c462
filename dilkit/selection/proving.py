"""`python -m dilkit.selection.proving REQUEST`: compute the cases of a proof, and print the faults; nothing if all was right.

REQUEST is JSON: backend, device, dtype, head_dim, gradients, varlen, dropout, kinds, softcap, bias, stored, group; with a dtype
of stored rows it is for steps of decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from dilkit import environment
from dilkit.bias.form import BiasForm
from dilkit.pattern import BlockSparse, DilatedSegment, Documents, GlobalTokens, Pattern, Prefix, SlidingWindow, Strided
from dilkit.testing.bias_forms import form_like
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

    `kinds`: with branches of other kinds than segments, too. `softcap`: with scores that are capped. `bias`: with one that is
    computed by the same code.
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


def main(request: str) -> int:
    """Print the faults of each case that is not right, or that none was computed."""
    options = json.loads(request)
    if options["stored"]:
        return prove_steps(options)
    features = {name: options[name] for name in ("varlen", "dropout", "kinds", "softcap")}
    bias = BiasForm.decode(options["bias"]) if options["bias"] else None
    chosen = cases(options["dtype"], options["head_dim"], options["gradients"], bias=bias, **features)
    with environment.without_proofs():
        results = [check(options["backend"], case, options["device"]) for case in chosen]
    texts = " | ".join(f"{r.case.variant}: {'; '.join(r.reasons)}" for r in results if r.verdict in ("failed", "broken"))
    if texts:
        print(f"computed wrongly: {texts}")
    elif all(result.verdict == "refused" for result in results):
        print(f"computed nothing: {'; '.join(results[0].reasons)}")
    return 0


def prove_steps(options: dict[str, Any]) -> int:
    """Print the faults of decoding steps. A backend that refuses them raises."""
    from dilkit.selection.decoding_proof import StepProof

    sizes = {name: options[name] for name in ("backend", "device", "dtype", "stored", "head_dim", "group", "softcap")}
    with environment.without_proofs():
        wrong = list(StepProof(**sizes, bias=BiasForm.decode(options["bias"]) if options["bias"] else None).complaints())
    if wrong:
        print(f"computed wrongly: {' | '.join(wrong)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
