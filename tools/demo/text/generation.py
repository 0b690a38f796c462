"""Time of the next byte as the text grows: with caches, and by computing every row again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dilkit.tools.demo.text.model import VOCABULARY, ByteTransformer
from dilkit.tools.demo.text.scaling import LONGEST
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.kinds.demo import NextByte

REPEATS, SAMPLE_SECONDS = 3, 0.02


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
        """Which bytes they are makes no difference to the time."""
        text, caches = torch.randint(VOCABULARY, (1, tokens)), self.model.caches()
        self.model(text, caches)
        calls = {"cached": lambda: self.model(text[:, -1:], caches), "recomputed": lambda: self.model(text)}
        samples = time_interleaved(calls, repeats=REPEATS, min_time=SAMPLE_SECONDS)
        return NextByte(tokens, samples["cached"].samples_s, samples["recomputed"].samples_s)
