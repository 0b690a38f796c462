"""Time of the next byte as the text grows: with caches, and by computing every row again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dilkit.tools.demo.text.model import VOCABULARY, ByteTransformer
from dilkit.tools.demo.text.record import NextByte
from dilkit.tools.demo.text.scaling import LONGEST
from dilkit.tools.measure.timing import time_interleaved

REPEATS, STEPS = 5, 16
"""Samples, and the bytes in one sample with caches."""


class GenerationSweep:
    """Measures `model`, length by length. `rows` is up to date whenever it is interrupted."""

    def __init__(self, model: ByteTransformer, lengths: Sequence[int]) -> None:
        self.model, self.lengths = model, lengths
        self.rows: list[NextByte] = []

    def run(self) -> None:
        """Measure until calls take too long."""
        for tokens in self.lengths:
            self.rows.append(self._measured(tokens))
            if min(self.rows[-1].recomputed) > LONGEST:
                break

    @torch.no_grad()
    def _measured(self, tokens: int) -> NextByte:
        """Of the last bytes of so many, where segments are nearly full and caches hold the most.

        Which bytes they are makes no difference to the time.
        """
        text, caches, steps = torch.randint(VOCABULARY, (1, tokens)), self.model.caches(), min(STEPS, tokens // 2)
        begun = tokens - steps - 1  # short of where segments end: caches cannot go back from there
        self.model(text[:, :begun], caches)

        def cached() -> None:
            for i in range(begun, begun + steps):
                self.model(text[:, i : i + 1], caches)

        def go_back() -> None:
            for cache in caches:
                cache.crop(begun)

        calls = {"cached": cached, "recomputed": lambda: self.model(text)}
        samples = time_interleaved(calls, repeats=REPEATS, before=go_back)
        one = tuple(seconds / steps for seconds in samples["cached"].samples_s)
        return NextByte(tokens, one, samples["recomputed"].samples_s)
