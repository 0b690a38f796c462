"""Figures that a document published of attention along a Hilbert curve, with what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.tools.bench.published.claim import Claim, Setting

HILBERT = "Hilbert Ring Attention with DilatedAttention Core"
HILBERT_SETTINGS = {
    "single segment": Setting(8192, (2048,), (1,)),
    "multi-segment": Setting(8192, (2048, 4096), (1, 2)),
    "no dilation": Setting(16384, (4096,), (1,)),
    "dilation=2": Setting(16384, (4096,), (2,)),
    "no dilation, 32K": Setting(32768, (8192,), (1,)),
    "multi-dilation": Setting(32768, (4096, 8192), (2, 4)),
}


def hilbert() -> Iterator[Claim]:
    noise = "the same flag off took 305 ms or 25 ms in one run; standard was always timed first"
    wrong = "its order is no permutation: 58 % of the keys were lost at 4,096 tokens"
    rows = (
        (701631, 762989, 1.09),
        (415310, 647901, 1.56),
        (53719, 60108, 1.12),
        (178779, 475420, 2.66),
        (32727, 33839, 1.03),
        (216805, 210283, 0.97),
    )
    for (name, setting), (standard, ordered, times) in zip(HILBERT_SETTINGS.items(), rows, strict=True):
        figure = f"{name}, {setting.seq:,} tokens"
        yield Claim(HILBERT, f"{figure}, standard", standard, "tokens/s", setting, note=noise)
        yield Claim(HILBERT, f"{figure}, Hilbert", ordered, "tokens/s", setting, who="ordered", note=wrong)
        yield Claim(HILBERT, f"{figure}, Hilbert over standard", times, "speedup", setting, setting, "ordered", note=wrong)
    pool = "a pool of memory; here torch's caching allocator alone, so that there is nothing to compare"
    yield Claim(HILBERT, "memory pool, average speedup", 0.98, "speedup", None, note=pool)
    yield Claim(
        HILBERT,
        "xFormers, average speedup",
        1.08,
        "speedup",
        None,
        note="a backend that is no backend here; see the table of backends",
    )
    after = "held after the run, with models of earlier runs still alive: no peak"
    memory = (
        ("single segment", "auto", 0.08),
        ("single segment", "ordered", 0.25),
        ("no dilation", "auto", 0.92),
        ("no dilation, 32K", "auto", 1.08),
    )
    for name, who, gib in memory:
        setting = HILBERT_SETTINGS[name]
        kind = "Hilbert and pool" if who == "ordered" else "standard"
        yield Claim(HILBERT, f"memory, {setting.seq:,} tokens, {kind}", gib * 1024, "MiB", setting, who=who, note=after)
