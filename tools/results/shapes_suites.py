"""The shapes of the suites' results: of all that is told of them. What else a file holds is not read."""

from __future__ import annotations

from typing import Any

from dilkit.tools.results.schema import (
    Shape,
    anything,
    chosen,
    fields,
    flag,
    listed,
    matching,
    maybe,
    named,
    number,
    text,
    where,
    whole,
)
from dilkit.tools.results.shapes import (
    AMOUNT,
    BYTES,
    CEILINGS,
    COPY,
    DIFFERENCE,
    MATMUL,
    SECONDS,
    SIZE,
    TIME,
    TIMED,
    entry,
    result,
)

_FIGURE = dict(name=text, must=maybe(DIFFERENCE), unit=text, lower=flag, values=named(number(-1e18, 1e18)), verdict=text)
RUN = dict(quick=whole(0, 2**20), interrupted=flag)
FIGURES = listed(fields(_FIGURE | dict(aim=maybe(DIFFERENCE))))
_CASE = dict(config=text, seq=SIZE, head_dim=SIZE, is_causal=flag, backward=flag, matmul=MATMUL)
_ENTRIES = named(entry())

SUITE = result(
    RUN
    | dict(
        suite=matching("cpu", '"cpu"'),
        figures=FIGURES,
        isa=text,
        thread_count=SIZE,
        repeats=SIZE,
        cases=listed(fields(_CASE | dict(entries=where(_ENTRIES, lambda v: "native" in v, "an entry of native")), CEILINGS)),
        dense=listed(fields(dict(head_dim=SIZE, entries=_ENTRIES))),
        dtypes=listed(fields(dict(head_dim=SIZE, entries=fields(dict(float32=TIMED, bfloat16=TIMED, float16=TIMED))))),
        threads=listed(fields(dict(head_dim=SIZE, threads=SIZE, entries=fields(dict(one=TIMED, all=TIMED))))),
        inner_loops=listed(fields(dict(head_dim=SIZE, tile_gflops=AMOUNT, fma_gflops=AMOUNT))),
        million=listed(fields(dict(seq=SIZE, time=TIME, gflops=AMOUNT))),
    )
)

_STEP = fields(dict(seq=SIZE, matmul=MATMUL, copy=COPY, entries=_ENTRIES))
_GPU_CASE = fields(_CASE | dict(dtype=text, copy=COPY, entries=_ENTRIES))
_GPU_LONG = chosen(
    lambda step: fields(
        dict(seq=SIZE, verdict=text, reasons=listed(text)) | (dict(time=TIME, gflops=AMOUNT) if step.get("time") else {})
    )
)
SUITE_GPU = result(
    RUN
    | dict(
        suite=matching("gpu", '"gpu"'),
        figures=FIGURES,
        backends=listed(text),
        cases=listed(_GPU_CASE),
        launch_bound=listed(_STEP),
        seeds=listed(_STEP),
        memory=listed(fields(dict(dtype=text, scratch_bytes=named(maybe(whole(-(2**62))))))),
        long=listed(where(_GPU_LONG, lambda step: "time" in step, "time, or null in its place,")),
    )
)


def _tried(needed: dict[str, Shape]) -> Shape:
    """A step of the ring suite: what it found, or what became of its job."""
    return listed(chosen(lambda step: fields(dict(failed=text) if "failed" in step else needed)))


def _as_many(found: dict[str, Any]) -> bool:
    return {len(counts) for counts in (*found["schedules"].values(), found["full_ring"])} == {len(found["ranks"])}


_PEAKS = dict(seq=SIZE, ranks=SIZE, threads=SIZE, peak_bytes=listed(BYTES, 1), tensors_bytes=BYTES)
_COUNTS = listed(whole(), 1)
_VOLUMES = fields(dict(seq=SIZE, ranks=listed(SIZE, 1), schedules=named(_COUNTS, 1), full_ring=_COUNTS))
_FAULT = dict(kind=text, transport=text, options=text, error=text, timeout=DIFFERENCE, seconds=DIFFERENCE)
_WAITS = listed(fields(dict(begin=DIFFERENCE, end=DIFFERENCE)))
SUITE_RING = result(
    RUN
    | dict(
        suite=matching("ring", '"ring"'),
        repeats=SIZE,
        mpi=maybe(text),
        processes=listed(matching("mpi|gloo", "mpi or gloo")),
        figures=listed(fields(_FIGURE | dict(must=DIFFERENCE))),
        volumes=listed(where(_VOLUMES, _as_many, "as many counts as ranks"), 0, 1),
        bytes=_tried(dict(calls=listed(anything))),
        agreement=_tried(dict(calls=listed(anything))),
        faults=_tried(_FAULT | dict(names_rank=flag, names_step=flag)),
        memory=_tried(_PEAKS | dict(config=text)),
        growth=_tried(_PEAKS),
        race=_tried(dict(ranks=SIZE, one_rank_threads=SIZE, entries=fields({"ranks": TIMED, "one rank": TIMED}))),
        timeline=_tried(dict(transport=text, seq=SIZE, ranks=listed(fields(dict(seconds=SECONDS, waits=_WAITS)), 1))),
        million=_tried(dict(seq=SIZE, ranks=SIZE, planned_bytes=_COUNTS, sent_bytes=maybe(_COUNTS))),
    )
)
