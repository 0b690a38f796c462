"""`dilkit demo --llama`: a small Llama learns with full attention, and goes on with dilated attention."""

import argparse
import sys
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from dilkit import Pattern, Problem
from dilkit.device import probe
from dilkit.integrations.transformers import convert
from dilkit.integrations.transformers.registration import transformers
from dilkit.tools.demo.corpus import load_text
from dilkit.tools.demo.trainer import LOSS, Run, Trainer, judgements, rows_by_name, run_table
from dilkit.tools.demo.transformer import TextTask, bits_per_byte
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import Report, ResultTable, fact, of
from dilkit.tools.results.rows import RowsResult

TITLE = "dilkit demo --llama"
CONTEXT, PATTERN, JUDGEMENTS = 1024, Pattern([128, 1024], [1, 8]), 5
LAYERS, WIDTH, HEADS, KV_HEADS = 4, 128, 4, 2
BEFORE, DILATED, FULL = "full attention at first", "dilated from here on", "full throughout"
"""The trainings: both of the latter go on from the weights of the first."""


class LlamaTask(TextTask):
    def loss(self, windows: Tensor) -> Tensor:
        return bits_per_byte(self.model(input_ids=windows[:, :-1].long()).logits, windows)


def run(args: argparse.Namespace) -> int:
    """Train, convert a copy, and go on with both on the same windows; 0, or 130 when interrupted."""
    corpus, package = load_text(args.text, CONTEXT), transformers()
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    sizes |= dict(vocab_size=256, intermediate_size=344, max_position_embeddings=CONTEXT, use_cache=False)
    torch.manual_seed(args.seed)
    model: Any = package.LlamaForCausalLM(package.LlamaConfig(**sizes))
    options: Any = dict(is_causal=True, requires_grad=True, device=probe("cpu"))
    problem = Problem(seq=CONTEXT, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH // HEADS, pattern=PATTERN, **options)
    length = args.steps, args.minutes and args.minutes / 3
    with Run(TITLE, args, model, problem, corpus.facts | dict(layers=LAYERS, converted=[])) as demo:
        demo.train(BEFORE, Trainer(LlamaTask(model, corpus, CONTEXT, args.seed), *length), JUDGEMENTS)
        dilated = deepcopy(model)
        report = convert(dilated, PATTERN)
        demo.facts["converted"] = [*map(str, report.layers)]
        print(report, file=sys.stderr)
        demo.train(DILATED, Trainer(LlamaTask(dilated, corpus, CONTEXT, args.seed + 1), *length), JUDGEMENTS)
        demo.train(FULL, Trainer(LlamaTask(model, corpus, CONTEXT, args.seed + 1), *length), JUDGEMENTS)
    return demo.code


def outcome(result: RowsResult) -> str:
    before, dilated, full = ([point["loss"] for point in judgements(result, name)] for name in (BEFORE, DILATED, FULL))
    if not (before and dilated and full):
        return "not trained to its end: nothing to compare"
    steps = rows_by_name(result, "training")[DILATED].values["steps"]
    return (
        f"held-out bits per byte {before[-1]:.3f} with full attention, {dilated[0]:.3f} when {result.facts['pattern']} takes its "
        f"place, {dilated[-1]:.3f} after {steps:,} steps more; {full[-1]:.3f} where attention stays full"
    )


COLUMNS = fact("tokens", template="{:,}"), *(of(who, LOSS) for who in (BEFORE, DILATED, FULL))
LOSSES = ResultTable("Held-out bits per byte", "held out", COLUMNS, timed=False, who=(BEFORE,))


def made_tables(result: RowsResult) -> Iterable[Table]:
    converted = enumerate(result.facts["converted"])
    yield Table("What was converted", ("layer", "what"), tuple((f"{i}", line) for i, line in converted))
    trained = [(who, f"{row.values['steps']:,} steps") for who, row in rows_by_name(result, "training").items()]
    yield run_table(result, trained)


def loss_plots(result: RowsResult) -> Iterable[Plot]:
    """Yield the losses of all trainings, two to the right of the one that they go on from."""
    start, series = 0, []
    for name, row in rows_by_name(result, "training").items():
        points = [plain(point["tokens"] + start, point["loss"]) for point in judgements(result, name)]
        series.append(Series(name, tuple(points)))
        start = start or row.values["tokens"]
    axes = Axis("bytes of training", "number", log=False), Axis("held-out bits per byte", "number", log=False)
    yield Plot("A Llama goes on with dilated attention", "lines", (*series[1:], *series[:1]), axes)


REPORT = Report(
    command=TITLE,
    summary=outcome,
    tables=(LOSSES, made_tables),
    plots=(loss_plots,),
    method="Bits per byte are the mean over windows of {context:,} bytes of files that were never trained on. The Llama has "
    "random weights at first, and learns with transformers' own attention (sdpa). Then one copy is converted by "
    "dilkit.integrations.transformers.convert, another stays as it is, and both go on from the same weights, with the same "
    "windows in the same order, the same learning rates and a new optimizer.",
)
