"""Figures that two documents published of attention over ranks, with what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.tools.bench.published.claim import Claim, Setting, halves

HYBRID = "Hybrid Ring Dilated Attention - Performance Summary"
RING = "Ring Attention Benchmark Summary"


def hybrid() -> Iterator[Claim]:
    rows = (
        (1024, 2, 113, 56.48, 7858),
        (2048, 2, 340, 85.00, 14415),
        (4096, 1, 518, 129.43, 6948),
        (8192, 1, 816, 101.95, 6261),
        (16384, 1, 1038, 64.86, 3523),
    )
    mixed = "batch 2 up to 2,048 tokens, 1 beyond (from MB and KB/token)"
    for seq, batch, mib, kib, rate in rows:
        setting = Setting(seq, (512, 1024), (1, 2), batch, ranks=2)
        for quantity, claimed in (("MiB", mib), ("KiB/token", kib), ("tokens/s", rate)):
            yield Claim(HYBRID, f"{seq:,} tokens on 2 GPUs", claimed, quantity, setting, note=mixed)
    last, first = (Setting(seq, (512, 1024), (1, 2), batch, ranks=2) for seq, batch in ((16384, 1), (1024, 2)))
    yield Claim(HYBRID, "memory per token, 16K over 1K", 1.15, "KiB/token ratio", last, first, note=f"mixes batches: {mixed}")
    yield Claim(HYBRID, "longest sequence tested on 2 GPUs", 16384, "tokens", None, note="a choice of the test, not a limit")
    standard = "float16 for 8 heads, where the runs are float32; what dense attention holds that writes its scores down"
    yield Claim(HYBRID, "standard attention, scores of 16K tokens, GB", 4, "GB", None, note=standard)
    yield Claim(HYBRID, "memory reduction against that on 2 GPUs, %", 75, "%", None, note="follows from the two before")


def _ring_setting(seq: int, ranks: int) -> Setting:
    return Setting(seq, halves(seq), (1, 2), 2, ranks=ranks)


def ring() -> Iterator[Claim]:
    slow = "the one-GPU times are 134 to 267 times those of the same class, measured ten minutes earlier (5.8, 10.3, 23.4 ms)"
    other = "the result of the ring is not attention"
    one = {
        2048: (775, 86.01, 5285, 21.50),
        4096: (2742, 190.01, 2987, 23.75),
        8192: (4362, 380.02, 3756, 23.75),
        16384: (10240, 760.03, 3200, 23.75),
    }
    two = {
        2048: (7, 46.00, 550252, 11.50),
        4096: (15, 102.88, 538243, 12.86),
        8192: (36, 204.88, 459148, 12.81),
        16384: (408, 408.89, 80365, 12.78),
        32768: (1703, 816.03, 38475, 12.75),
    }
    for ranks, table, note in ((1, one, slow), (2, two, other)):
        for seq, row in table.items():
            for quantity, claimed in zip(("ms", "MiB", "tokens/s", "KiB/token"), row, strict=True):
                figure = f"{seq:,} tokens on {ranks} GPU{'s' * (ranks > 1)}"
                yield Claim(RING, figure, claimed, quantity, _ring_setting(seq, ranks), note=note)
            if ranks > 1:
                yield Claim(RING, figure, seq // ranks, "tokens/rank", _ring_setting(seq, ranks), note="follows from the two")
    yield from _ring_ratios()


def _ring_ratios() -> Iterator[Claim]:
    minus_input = "the whole input on every GPU was subtracted"
    for seq, factor, percent in ((2048, 1.87, 93.5), (4096, 1.85, 92.3), (8192, 1.85, 92.7), (16384, 1.86, 92.9)):
        pair = _ring_setting(seq, 2), _ring_setting(seq, 1)
        yield Claim(RING, f"{seq:,} tokens, 1 GPU over 2", factor, "reduction", *pair, note=minus_input)
        yield Claim(RING, f"{seq:,} tokens, of the possible 2x", percent, "efficiency", *pair, note=minus_input)
    invalid = "rests on the one-GPU times above; against the earlier ones it is 0.78, 0.67 and 0.66"
    for seq, times in ((2048, 104.1), (4096, 180.2), (8192, 122.2), (16384, 25.1)):
        yield Claim(RING, f"{seq:,} tokens, 2 GPUs", times, "speedup", _ring_setting(seq, 2), _ring_setting(seq, 1), note=invalid)
    pair = _ring_setting(8192, 2), _ring_setting(8192, 1)
    yield Claim(RING, "average memory reduction", 1.86, "reduction", *pair, note="an average of ratios; here 8,192 tokens")
    yield Claim(RING, "average of the possible 2x", 93, "efficiency", *pair, note="the same")
    yield Claim(RING, "KiB/token saved by 2 GPUs, %", 45.9, "saved", *pair, note="of averages 23.19 and 12.54; here 8,192 tokens")
    yield Claim(RING, "average KiB/token, 1 GPU", 23.19, "KiB/token", pair[1], note="here 8,192 tokens")
    yield Claim(RING, "average KiB/token, 2 GPUs", 12.54, "KiB/token", pair[0], note="here 8,192 tokens")
    for base, kib in zip(reversed(pair), (23.5, 12.5), strict=True):
        figure = f"memory planning, {base.ranks} GPU{'s' * (base.ranks > 1)}"
        yield Claim(RING, figure, kib, "KiB/token", base, note="rounded from the table; here 8,192 tokens")
    yield Claim(RING, "fastest, tokens/s", 798000, "tokens/s", _ring_setting(4096, 1), note="one GPU, 44 % of the rows computed")
    limit = "a limit written into the test; 0.9 of 8 GB were used"
    yield Claim(RING, "longest sequence, 1 GPU", 16384, "longest", None, note=limit)
    yield Claim(RING, "longest sequence, 2 GPUs", 32768, "tokens", None, note="the same")
