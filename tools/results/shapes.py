"""The shape of each kind of result but the suites': of all that is told of it. What else a file holds is not read."""

from __future__ import annotations

from typing import Any

from dilkit.backends.cuda.table import STORAGE
from dilkit.tools.bench.kernels import FIELDS
from dilkit.tools.results.schema import Shape, chosen, fields, flag, listed, matching, maybe, named, number, text, where, whole

SECONDS = number(1e-12, 1e9)
DIFFERENCE = number(-1e9, 1e9)
AMOUNT = number(1e-12, 1e36)
"""Of FLOPs, of tokens a second, and the like: positive."""
SIZE = whole(1, 2**40)
"""Of something that is counted: tokens, heads, ranks, threads."""
BYTES = whole(1)
MOST_SAMPLES = 10_000

SAMPLES = listed(SECONDS, 1, MOST_SAMPLES)
TIME = fields(dict(median_s=SECONDS, q1_s=SECONDS, q3_s=SECONDS, samples_s=SAMPLES))
TIMED = fields(dict(time=TIME))
MATMUL = FMA = fields(dict(gflops=AMOUNT, samples_s=SAMPLES))
COPY = fields(dict(gb_per_s=AMOUNT, samples_s=SAMPLES))
CEILINGS: dict[str, Shape] = dict(copy=COPY, fma=FMA)
"""What may stand beside a matmul."""

_HARDWARE = dict(device_name=text, cores=SIZE, threads=SIZE)
_SOFTWARE = dict(python=text, torch=text, numpy=text, dilkit=text, git_revision=maybe(text), git_dirty=maybe(flag))
ENVIRONMENT = chosen(
    lambda e: fields({**_HARDWARE, **_SOFTWARE, **(dict(capability=text, cuda=maybe(text)) if "capability" in e else {})})
)
HEADER = dict(command=text, date=text, environment=ENVIRONMENT)


def result(needed: dict[str, Shape], optional: dict[str, Shape] | None = None) -> Shape:
    """A file with these fields beside those that every result has."""
    return fields({**HEADER, **needed}, optional)


def entry(more: dict[str, Shape] | None = None, optional: dict[str, Shape] | None = None) -> Shape:
    """What became of a contestant: the verdict with its reasons, and all figures where it was measured; `optional` besides."""
    told = dict(verdict=text, reasons=listed(text))
    speed = dict(time=TIME, flops=AMOUNT, gflops=AMOUNT, matmul_fraction=AMOUNT, tokens_per_s=AMOUNT)
    measured, other = fields({**told, **speed, **(more or {})}), fields(told)
    besides = fields({}, dict(memory_note=maybe(text)) | (optional or {}))

    def shape(value: Any, place: str) -> str | None:
        timed = isinstance(value, dict) and (value.get("verdict") == "measured" or "time" in value)
        return (measured if timed else other)(value, place) or besides(value, place)

    return shape


# dilkit bench

PROBLEM = fields(
    dict(
        pattern=fields(dict(text=text, segment_lengths=listed(BYTES, 1))),
        batch=SIZE,
        heads=SIZE,
        kv_heads=SIZE,
        head_dim=SIZE,
        dtype=text,
        is_causal=flag,
        key_padding_mask=flag,
        backward=flag,
    )
)
_SHARES = where(listed(number(0, 1e36), 1), any, "some work")
_BY_RANK = fields(dict(sent_bytes=listed(whole(), 1), planned_bytes=listed(whole(), 1), work=_SHARES))
_MEMORY = dict(peak_bytes=maybe(whole()), kb_per_token=maybe(number(0, 1e18)))


def _length(backward: bool, ranks: bool) -> Shape:
    more = _MEMORY | (dict(forward_peak_bytes=maybe(whole())) if backward else {}) | (dict(ranks=_BY_RANK) if ranks else {})
    return fields(dict(seq=SIZE, output_bytes=BYTES, matmul=MATMUL, entries=named(entry(more))), CEILINGS)


def _bench(found: dict[str, Any]) -> Shape:
    problem = found.get("problem")
    backward = isinstance(problem, dict) and problem.get("backward") is True
    method = fields(dict(repeats=SIZE, min_time_s=number(0, 1e9)))
    lengths = listed(_length(backward, "ranks" in found), 0, 1000)
    ranks = fields(dict(world_size=SIZE, transport=text, threads=SIZE))
    return result(dict(problem=PROBLEM, method=method, lengths=lengths, interrupted=flag), dict(ranks=ranks))


BENCH = chosen(_bench)
_MODE = fields(dict(public=TIME, direct=TIME, overhead_s=DIFFERENCE, overhead_of_fastest_s=DIFFERENCE))
OVERHEAD = result(dict(problem=PROBLEM, seq=SIZE, backend=text, modes=named(_MODE)))

# The compiler's report

_KERNEL = rf"[a-z]\w{{0,60}} sm_\d{{1,4}} ({'|'.join(STORAGE)})" + r" \d{1,9}" * (len(FIELDS) - 3)
KERNELS = result(
    dict(
        nvrtc=text,
        quick=flag,
        fields=where(listed(text), lambda names: names == list(FIELDS), f"{', '.join(FIELDS)}, in this order,"),
        rows=listed(matching(f"(?a:{_KERNEL})", f"{len(FIELDS)} words: {', '.join(FIELDS)}")),
    )
)
