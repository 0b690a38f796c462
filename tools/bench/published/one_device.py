"""Figures that two documents published of implementations on one device, with what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.tools.bench.published.claim import Claim, Setting, halves

COMPREHENSIVE = "Comprehensive Benchmark Results"
ORIGINAL = "Original DilatedAttention Benchmark Report"


def implementations(seq: int) -> Setting:
    return Setting(seq, (1024, 2048, 4096), (1, 2, 4))


def comprehensive() -> Iterator[Claim]:
    wrong = "attended over 2 or 3 heads a token: another function"
    noise = "noise: 33.6 ms with batch 2 at 8,192 tokens, 129.9 ms with batch 1"
    rows = (
        (2048, "ImprovedDilatedAttention", "auto", None, 1.07, wrong),
        (4096, "DilatedAttention", "reference", 44.54, None, noise),
        (4096, "ImprovedDilatedAttention", "auto", 10.40, 4.28, wrong),
        (4096, "RingDilatedAttention", "auto", 3.91, 11.4, wrong),
        (4096, "MultiheadDilatedAttention", "multihead", 7.92, 5.62, "against a baseline without projections"),
        (4096, "ImprovedMultiheadDilatedAttention", "multihead", 14.85, 3.00, f"{wrong}; the baseline has no projections"),
        (4096, "RingMultiheadDilatedAttention", "multihead", 18.69, 2.38, f"{wrong}; the baseline has no projections"),
        (8192, "DilatedAttention", "reference", 129.89, None, noise),
        (8192, "ImprovedDilatedAttention", "auto", 12.01, 10.8, wrong),
        (8192, "RingDilatedAttention", "auto", 7.54, 17.2, wrong),
    )
    for seq, name, who, ms, times, note in rows:
        setting = implementations(seq)
        if ms is not None:
            yield Claim(COMPREHENSIVE, f"{name}, {seq:,} tokens", ms, "ms", setting, who=who, note=note)
        if times is not None:
            figure = f"{name}, {seq:,} tokens, over DilatedAttention"
            yield Claim(COMPREHENSIVE, figure, times, "speedup", setting, setting, who, "reference", note)
    difference = "a difference taken after the call, not a peak"
    yield Claim(COMPREHENSIVE, "memory, 8,192 tokens", 0, "MiB", implementations(8192), note=difference)


def original() -> Iterator[Claim]:
    half = (
        "float16 on Pascal, which has no fast float16; the same code in float32 took 1.4, 2.2, 5.9, 10.8 ms for 1K to 8K tokens"
    )
    batches = "the segments grow with the sequence, so that work is quadratic by construction"
    quick = ((1024, 2, 8.3, 19.5, 245546), (2048, 2, 24.8, 39.0, 165474), (4096, 2, 93.4, 78.0, 87705))
    quick += ((8192, 1, 354.1, 78.0, 23131), (16384, 1, 1967.3, 156.0, 8327))
    for seq, batch, ms, mib, rate in quick:
        setting = Setting(seq, halves(seq), (1, 2), batch, dtype="float16")
        for quantity, claimed in (("ms", ms), ("MiB", mib), ("tokens/s", rate)):
            yield Claim(ORIGINAL, f"{seq:,} tokens, batch {batch} (quick benchmark)", claimed, quantity, setting, note=half)
    lengths = (
        (512, 1.6, 4.4, 1.0),
        (1024, 4.3, 8.8, 2.7),
        (2048, 16.3, 17.5, 10.2),
        (4096, 46.2, 35.0, 28.9),
        (8192, 239.7, 70.0, 149.8),
    )
    alone = {row[0]: Setting(row[0], halves(row[0]), (1, 2), dtype="float16") for row in lengths}
    yield from _scaling("tokens, batch 1", lengths, alone, batches)
    yield Claim(ORIGINAL, "exponent of time in the length", 1.80, "exponent", alone[8192], alone[512], note=batches)
    yield Claim(ORIGINAL, "best tokens/s, 512 tokens", 316102, "tokens/s", alone[512], note=half)
    yield Claim(
        ORIGINAL, "KiB/token, every length", 8.75, "KiB/token", alone[8192], note="linear, not dominated by weights as it says"
    )
    yield Claim(
        ORIGINAL, "peak memory, 16,384 tokens", 156, "MiB", Setting(16384, (4096, 8192), (1, 2), dtype="float16"), note=half
    )
    heads = ((2, 8.0, 8.8, 1.0), (4, 16.0, 17.5, 2.0), (8, 55.3, 35.0, 6.9), (16, 91.5, 70.0, 11.4), (32, 113.3, 140.0, 14.2))
    by_heads = {row[0]: Setting(2048, (512, 1024), (1, 2), 2, row[0], "float16") for row in heads}
    yield from _scaling("heads, 2,048 tokens, batch 2", heads, by_heads, half)
    sizes = ((1, 33.7, 17.5, 1.0), (2, 37.5, 35.0, 1.1), (4, 55.5, 70.0, 1.6), (8, 293.4, 140.0, 8.7))
    by_batch = {row[0]: Setting(2048, (512, 1024), (1, 2), row[0], dtype="float16") for row in sizes}
    yield from _scaling("sequences of 2,048 tokens", sizes, by_batch, half)
    yield from _configurations(half)


def _scaling(what: str, rows: tuple[tuple[int, float, float, float], ...], by: dict[int, Setting], note: str) -> Iterator[Claim]:
    for size, ms, mib, factor in rows:
        figure = f"{size:,} {what}"
        yield Claim(ORIGINAL, figure, ms, "ms", by[size], note=note)
        yield Claim(ORIGINAL, figure, mib, "MiB", by[size], note=note)
        yield Claim(ORIGINAL, f"{figure}, over the first", factor, "slowdown", by[size], by[rows[0][0]], note=note)


def _configurations(note: str) -> Iterator[Claim]:
    rows = (
        ("standard", (1024, 2048), (1, 2), 93.4, note),
        ("more segments", (512, 1024, 2048), (1, 2, 4), 92.1, note),
        (
            "extreme dilation",
            (512, 1024, 2048, 4096),
            (1, 4, 16, 64),
            37.9,
            "three heads in four compute 1/4 to 1/64 of the rows",
        ),
    )
    for name, lengths, rates, ms, why in rows:
        yield Claim(ORIGINAL, f"{name}, 4,096 tokens", ms, "ms", Setting(4096, lengths, rates, 2, dtype="float16"), note=why)
