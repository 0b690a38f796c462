"""The shape of the result of the suite of published settings: of all that is told of it. What else it holds is not read."""

from __future__ import annotations

from dilkit.tools.report.kinds.seed_rows import UNITS
from dilkit.tools.results.schema import fields, flag, listed, matching, maybe, named, number, text, where, whole
from dilkit.tools.results.shapes import BYTES, CEILINGS, MATMUL, SECONDS, SIZE, TIMED, entry, result
from dilkit.tools.results.shapes_suites import RUN

_QUANTITY = where(text, UNITS.__contains__, f"one of {', '.join(UNITS)}")
_WORDS = dict.fromkeys(("document", "figure", "note", "hardware"), text)
_FIGURE = _WORDS | dict(claimed=number(-1e18, 1e18), quantity=_QUANTITY, why=maybe(text))
_FIGURES = listed(fields(_FIGURE | dict.fromkeys(("ours", "per_tflops"), maybe(number(-1e18, 1e18)))))
_SIZES = dict(seq=SIZE, segment_lengths=listed(SIZE, 1), dilation_rates=listed(SIZE, 1), batch=SIZE, heads=SIZE, dtype=text)
SETTING = fields(_SIZES | dict(ranks=SIZE))
_OFF = number(0, 1e36)
_DIFFERS = maybe(fields(dict(computes=text, out_relative=_OFF), dict(dquery_relative=_OFF)))
_ENTRY = entry({}, dict(differs=_DIFFERS, memory_bytes=maybe(BYTES)))
_CASE = fields(dict(setting=SETTING, backward=flag, tokens=SIZE, seq=SIZE, matmul=MATMUL, entries=named(_ENTRY)), CEILINGS)
_ROW = fields(
    dict(setting=SETTING, backward=flag, tokens=SIZE, transport=text, entries=named(TIMED), memory_note=maybe(text))
    | dict(peak_bytes=maybe(listed(BYTES, 1)))
)
_JOBS = listed(fields(dict(ranks=SIZE, transport=text, rows=listed(_ROW)), dict(failed=text)))
_TRIED = listed(fields(dict(seq=SIZE, bytes=maybe(whole()), seconds=maybe(SECONDS))))
_LONGEST = dict(who=text, backward=flag, limit_bytes=BYTES, seq=maybe(whole()), tried=_TRIED, stopped=maybe(text))
SUITE_SEEDS = result(
    RUN
    | dict(
        suite=matching("seeds", '"seeds"'),
        repeats=SIZE,
        processes=listed(text),
        chosen=fields(dict(device=text)),
        earlier=listed(fields(dict(date=text))),
        figures=_FIGURES,
        cases=listed(_CASE),
        cache=listed(fields(dict(setting=SETTING, entries=fields({"auto": TIMED, "no cache": TIMED})))),
        ranks=_JOBS,
        growth=_JOBS,
        longest=listed(fields(_LONGEST)),
    )
)
