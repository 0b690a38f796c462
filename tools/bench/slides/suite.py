"""The suite of slides: GigaPath's slide encoder with random weights, fp32, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from dilkit import attention_mass
from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.threads import torch_threads, usable_cores
from dilkit.tools.bench.cpu.suite import instruction_set
from dilkit.tools.bench.slides import targets
from dilkit.tools.bench.slides.calls import embedding, gradients, mass_check, padded, shorter, slide
from dilkit.tools.bench.slides.cases import ARCHITECTURE, SlidesSizes
from dilkit.tools.bench.slides.record import ALONE, BATCH, OURS, PUBLISHED, HeadDim, LongSlide, Mass, SlideCase, SlidesResult
from dilkit.tools.bench.suite import NO_OPTION, Step, Suite
from dilkit.tools.measure.case import CaseFields, admit, side_by_side
from dilkit.tools.measure.ceilings import Ceilings
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.published_slides import published_embedding
from dilkit.tools.measure.single_call import agreement, call_once
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.record import Case, Entry, Samples

BACKENDS, MOST_ROUNDS = ("native", "sdpa"), 3


@dataclass(frozen=True)
class SlidesSuite(Suite[SlidesResult]):
    """The shortest measurements first. `full`: with gradients too, which takes four times as long as all the rest."""

    NAME = "slides"
    SUMMARY = "GigaPath's slide encoder beside its published procedure"
    RECORD = SlidesResult
    TARGETS = targets.TARGETS

    full: bool = False
    sizes: SlidesSizes = field(default_factory=SlidesSizes, metadata=NO_OPTION)

    def steps(self) -> Iterator[Step]:
        for dim in self.sizes.head_dims:
            yield Step("head_dims", f"attention of a layer, head_dim {dim}", partial(self.head_dim, dim))
        yield Step("several", "several slides, in one batch and one by one", self.several, 12)
        yield Step("encoder", "one slide, both ways", self.encoder, 24)
        yield Step("mass", "attention_mass", self.mass, 8)
        for backward in (False, True)[: 1 + self.full]:
            what = "with gradients and activation checkpointing" if backward else "forward"
            yield Step("long", f"a long slide, {what}", partial(self.long, backward), 160 if backward else 40)

    @contextmanager
    def prepared(self) -> Iterator[dict[str, Any]]:
        with torch_threads(min(self.sizes.threads, usable_cores())) as count:
            yield dict(isa=instruction_set(), thread_count=count, architecture=ARCHITECTURE)

    def wrong(self, result: SlidesResult) -> bool:
        """Whether a check failed."""
        cases: tuple[Case, ...] = (*result.head_dims, *result.encoder, *result.several)
        verdicts = {entry.verdict for case in cases for entry in case.entries.values()}
        return bool(verdicts & {"wrong", "failed"}) or not all(row.check.passed for row in result.mass)

    @property
    def config(self) -> SlideEncoderConfig:
        """The sizes of the model. --quick divides the lengths of segments too."""
        return shorter(self.sizes.model, self.divisor)

    def model(self, depth: int | None = None, checkpointing: bool = False) -> SlideEncoder:
        """A model of so many layers, or of all, with random weights, the same whenever it is made."""
        torch.manual_seed(0)
        return SlideEncoder(replace(self.config, depth=depth or self.config.depth), activation_checkpointing=checkpointing).eval()

    def head_dim(self, dim: int) -> HeadDim:
        """Backends on the attention of one layer, beside a matmul."""
        config, tiles = self.config, self.sizes.tiles // self.divisor
        problem = Problem(pattern=config.pattern, seq=tiles + 1, heads=config.num_heads, head_dim=dim)
        inputs, backends = Tensors.random(problem), backend_implementations(BACKENDS)
        flops = {one.name: one.flops(problem) for one in backends}
        entries = {
            one.name: admit(one, problem, inputs, self.budget, partial(_seconds, flops[one.name])) for one in backends
        }  # fmt: skip
        calls = {one.name: partial(one.once, inputs, problem) for one in backends if entries[one.name].verdict == "measured"}
        ceilings = Ceilings("float32", size=self.sizes.matmul // self.divisor)
        fields: CaseFields = side_by_side(entries, calls, flops, problem, ceilings, self.time)
        return HeadDim(head_dim=dim, tiles=tiles, **fields)

    def encoder(self) -> SlideCase:
        """One slide by the published procedure and by dilkit."""
        model, tiles = self.model(), self.sizes.tiles // self.divisor
        inputs = slide(tiles, self.config)
        calls = {PUBLISHED: partial(published_embedding, model, *inputs), OURS: partial(embedding, model, *inputs)}
        return SlideCase(tiles=(tiles,), depth=self.config.depth, entries=self.compared(calls, tiles))

    def several(self) -> SlideCase:
        """Several slides in one batch and one by one."""
        depth, tiles = self.sizes.several_depth, tuple(n // self.divisor for n in self.sizes.several)
        model, slides = self.model(depth), [slide(n, self.config) for n in tiles]
        together = padded(slides)
        calls = {
            ALONE: lambda: torch.cat([embedding(model, *one) for one in slides]),
            BATCH: lambda: embedding(model, *together),
        }
        return SlideCase(tiles=tiles, depth=depth, entries=self.compared(calls, max(tiles)))

    def compared(self, calls: Mapping[str, Callable[[], torch.Tensor]], tiles: int) -> dict[str, Entry]:
        """Whether all calls agree with the first; then their times, in turns, and the peak memory of each."""
        results = {name: call_once(call) for name, call in calls.items()}
        (_, first), *_ = results.items()
        others = {name: one.result for name, one in results.items() if one is not first}
        checks = {name: agreement("embedding", result, first.result, tiles) for name, result in others.items()}
        if wrong := {name: check for name, check in checks.items() if not check.passed}:
            return {name: Entry(verdict="wrong", reasons=(check.complaint,), check=(check,)) for name, check in wrong.items()}
        timed = self.time(calls)
        return {
            name: Entry(
                time=timed[name], check=tuple(filter(None, [checks.get(name)])), peak_bytes=one.peak_bytes, memory_note=one.why
            )
            for name, one in results.items()
        }

    def time(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Samples]:
        """In turns; all were called before."""
        return time_interleaved(calls, min(self.repeats, MOST_ROUNDS), warmup=0)

    def mass(self) -> Mass:
        """What all tiles look at, of queries and keys of one layer."""
        config, tiles = self.config, self.sizes.long // self.divisor
        dim = config.embed_dim // config.num_heads
        check = mass_check(config.pattern, config.num_heads, dim)
        query, key = torch.randn(2, 1, tiles + 1, config.num_heads, dim).unbind()
        one = call_once(partial(attention_mass, query, key, config.pattern))
        time = Samples.of([one.seconds])
        return Mass(
            tiles=tiles, check=check, time=time, peak_bytes=one.peak_bytes, output_bytes=query.nbytes, why=one.why
        )  # fmt: skip

    def long(self, backward: bool) -> LongSlide:
        """One long slide, once."""
        model, tiles = self.model(checkpointing=backward), self.sizes.long // self.divisor
        inputs = slide(tiles, self.config)
        one = call_once(partial(gradients if backward else embedding, model, *inputs))
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *inputs))
        time = Samples.of([one.seconds])
        return LongSlide(
            tiles=tiles, gradients=backward, time=time, held_bytes=held, peak_bytes=one.peak_bytes, why=one.why
        )  # fmt: skip


def _seconds(flops: float) -> float:
    """About how long a call of so many nominal FLOPs takes."""
    return flops / 40e9
