"""The job of `dilkit demo --llama`: full attention first, then dilated and full attention from the same weights."""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from typing import Any

from tqdm import tqdm

from dilkit import Pattern, Problem
from dilkit.device import probe
from dilkit.integrations.transformers import convert
from dilkit.tools.demo.block import model_facts
from dilkit.tools.demo.job import Job, backend_choice
from dilkit.tools.demo.llama.record import BEFORE, DILATED, FULL, LlamaDemoResult, LlamaTraining
from dilkit.tools.demo.llama.task import SIZES, NextByte, make_llama
from dilkit.tools.demo.text.corpus import load_text
from dilkit.tools.demo.text.record import Budget, ModelFacts
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.results.file import new_result

CONTEXT = 1024
PATTERN = Pattern([128, 1024], [1, 8])
JUDGEMENTS = 5
"""How often a training is judged in its course, besides before it."""


class LlamaJob(Job):
    """One run of the demo."""

    TITLE = "dilkit demo --llama"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.context, self.corpus = CONTEXT, load_text(args.text, CONTEXT)
        self.model = make_llama(CONTEXT, args.seed)
        heads, width = SIZES["num_attention_heads"], SIZES["hidden_size"]
        sizes: dict[str, Any] = dict(seq=CONTEXT, heads=heads, kv_heads=SIZES["num_key_value_heads"], head_dim=width // heads)
        self.problem = Problem(pattern=PATTERN, dtype="float32", device=probe("cpu"), is_causal=True, requires_grad=True, **sizes)
        self.facts = model_facts(ModelFacts, self.model, SIZES["num_hidden_layers"], self.problem)
        self.budget = Budget(seconds=60 * args.minutes / 3) if args.minutes else Budget(steps=args.steps)
        self.trainers: dict[str, Trainer] = {}
        self.layers: tuple[str, ...] = ()

    def work(self) -> None:
        """Train, convert a copy, and go on with both on the same windows."""
        self.stage = "training"
        self._train(BEFORE, self.model, self.args.seed)
        dilated = deepcopy(self.model)
        report = convert(dilated, PATTERN)
        self.layers = tuple(map(str, report.layers))
        tqdm.write(str(report), file=sys.stderr)
        self._train(DILATED, dilated, self.args.seed + 1)
        self._train(FULL, self.model, self.args.seed + 1)

    def _train(self, name: str, model: Any, seed: int) -> None:
        task = NextByte(model, self.corpus.train, self.corpus.held_out, self.context, seed)
        self.trainers[name] = Trainer(task, self.budget)
        self.train(self.trainers[name], JUDGEMENTS, f"{name}: ")

    def result(self, interrupted: str | None) -> LlamaDemoResult:
        """All there is so far."""
        return new_result(
            LlamaDemoResult,
            probe("cpu"),
            interrupted=interrupted,
            text=self.corpus.facts,
            model=self.facts,
            layers=self.layers,
            backend=backend_choice(self.problem),
            trainings=tuple(trainer.record(LlamaTraining, attention=name) for name, trainer in self.trainers.items()),
        )
