"""The shapes of the suites' results: of all that is told of them. What else a file holds is not read."""

from __future__ import annotations

from dilkit.tools.results.schema import (
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
    CEILINGS,
    COPY,
    DIFFERENCE,
    MATMUL,
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
