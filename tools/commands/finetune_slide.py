"""`dilkit finetune-slide`: GigaPath's slide encoder trained on files of tile features."""

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dilkit.integrations.gigapath.finetuning.record import Finetuning, Interval, Judgement, Settings
from dilkit.tools.commands.encode_slide import add_encoder_arguments
from dilkit.tools.console.arguments import make_folder, number, whole
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.progress import shown
from dilkit.tools.report.document import Axis, Plot, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import Report
from dilkit.tools.results.decode import decode, encode
from dilkit.tools.results.rows import RowsResult

DEFAULTS = Settings()
SETTINGS = ("epochs", "warmup_epochs", "accumulate", "base_rate", "layer_decay", "weight_decay", "freeze", "seed", "resamples")
CHANGES = ("embed_dim", "depth", "num_heads", "ngrids", "global_pool", "dropout", "drop_path")
"""Arguments that change the architecture's configuration."""
HELP = """\
train GigaPath's slide encoder for classes of slides or survival, from files of tile features

LABELS is a CSV file with columns slide, the name of its file of features without the ending; label, or else time and event (1:
seen, 0: observation ended); patient, so that no patient is on both sides; split (train, val, test), or patients are drawn.
Features are files as `dilkit encode-slide` reads them.

Writes into --out: finetune.json, .md and .png (figures and predictions, a page, curves), model.pt, which encode-slide takes as
--checkpoint, and checkpoint.pt, from which --resume goes on. AUROC needs torchmetrics: pip install 'dilkit[finetune]'."""
_share = number("a number from 0 to 1, 1 left out", lambda value: 0 <= value < 1)
_rate = number("a number of 0 or more", lambda value: value >= 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("labels", type=Path, metavar="LABELS", help="the table of slides, a CSV file")
    parser.add_argument("features", type=Path, metavar="FEATURES", help="the folder of files of tile features")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, to the same result")
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="FILE", help="the weights, such as slide_encoder.pth (default: random weights)")
    add_encoder_arguments(parser, "mean")
    for name in ("--embed-dim", "--depth", "--num-heads"):
        add(name, type=whole(1), metavar="N", help="of another encoder, without --checkpoint (default: that of --arch)")
    add("--dropout", type=_share, default=0.1, metavar="P", help="default %(default)s")
    add("--drop-path", type=_share, default=0.0, metavar="P", help="default %(default)s")
    again = "compute each layer anew in the backward pass (default: do)"
    add("--activation-checkpointing", action=argparse.BooleanOptionalAction, default=True, help=again)
    add = parser.add_argument_group("training").add_argument
    options: dict[str, tuple[Any, str]] = {
        "epochs": (whole(1), ""),
        "warmup_epochs": (_rate, "of the rising learning rate "),
        "accumulate": (whole(1), "slides a step "),
        "base_rate": (_rate, "the highest learning rate is this times --accumulate / 256 "),
        "layer_decay": (_rate, "a layer's learning rate over that of the next "),
        "weight_decay": (_rate, "of AdamW "),
        "resamples": (whole(1), "of the bootstrap "),
    }
    add("--freeze", action="store_true", help="train the head alone, on embeddings that are computed once")
    for name, (kind, text) in options.items():
        default = getattr(DEFAULTS, name)
        add(f"--{name.replace('_', '-')}", type=kind, default=default, metavar="N", help=f"{text}(default {default})")
    for name, share in (("val", 0.1), ("test", 0.2)):
        text = f"of the patients in {name}, if LABELS has no splits (default {share})"
        add(f"--{name}-share", type=_share, default=share, metavar="SHARE", help=text)
    add("--seed", type=whole(0), default=0, metavar="N", help="of splits, order, dropout and bootstrap (default 0)")


def run(args: argparse.Namespace) -> int:
    load_torch()
    from dilkit.device import probe
    from dilkit.integrations.gigapath.checkpoint import local_file, needed_tile_encoder, read_checkpoint
    from dilkit.integrations.gigapath.features import check_apart
    from dilkit.integrations.gigapath.finetuning import finetune, look_through, read_labels, split_examples
    from dilkit.integrations.gigapath.finetuning.model import config_for, first_encoder
    from dilkit.tools.report.files import publish
    from dilkit.tools.results.file import new_result

    settings = Settings(**{name: getattr(args, name) for name in SETTINGS})
    check_apart("--out", args.out, [args.features])
    checkpoint = None if args.checkpoint is None else read_checkpoint(local_file(args.checkpoint))
    tile_encoder = args.tile_encoder if checkpoint is None else needed_tile_encoder(checkpoint, args.tile_encoder)
    labels = read_labels(args.labels)
    splits = split_examples(labels, args.seed, args.val_share, args.test_share)
    with shown("slide") as show:
        done = partial(show, total=len(labels.examples))
        slides = look_through(labels, args.features, args.tile_size, done, tile_encoder, args.coords, args.microns_per_pixel)
    config = config_for(slides, args.arch, checkpoint, **{name: getattr(args, name) for name in CHANGES})
    options: dict[str, Any] = {name: getattr(args, name) for name in ("device", "backend", "seed", "activation_checkpointing")}
    encoder = first_encoder(config, checkpoint, **options)
    make_folder("--out", args.out)
    for note in settings.for_cohort(len(splits.train))[1]:  # before the wait, and in the report
        print(f"dilkit finetune-slide: {note}", file=sys.stderr)
    with shown("step") as show:
        record = finetune(labels, slides, encoder, args.out, settings, splits=splits, resume=args.resume, progress=show)
    began = None if args.checkpoint is None else str(args.checkpoint)
    facts = dict(checkpoint=began, peak_rate=record.settings.peak_rate, run=encode(record))
    result = new_result(RowsResult, probe(args.device), kind="finetune-slide", suite="finetune-slide", repeats=1, facts=facts)
    publish(result, args.out, "finetune", "dilkit finetune-slide", args.json)
    return 0


def run_of(result: RowsResult) -> Finetuning:
    """Return the record of the run. Raises `DecodeError` for a damaged one."""
    return decode(Finetuning, result.facts["run"], "facts.run")


def outcome(result: RowsResult) -> str:
    run = run_of(result)
    held_out = run.judged["test"]
    shown = "{} ({})".format(*_cells(_value(held_out))) if _value(held_out) else "not defined"
    return f"{_metric(run)} {shown} on {held_out.patients:,} held-out patients ({held_out.slides:,} slides)"


def made_tables(result: RowsResult) -> Iterable[Table]:
    run = run_of(result)
    judged = [(name, f"{one.slides:,}", f"{one.patients:,}", *_cells(_value(one))) for name, one in run.judged.items()]
    header = "split", "slides", "patients", _metric(run), "95% interval"
    yield Table("How right the scores are", header, tuple(judged))
    classes = [(name, *_cells(interval)) for name, interval in run.judged["test"].by_class.items()]
    yield Table("By class, on test", ("class", "AUROC", "95% interval"), tuple(classes))


def made_plots(result: RowsResult) -> Iterable[Plot]:
    run = run_of(result)
    train = tuple(plain(one.epoch, one.train) for one in run.curve)
    val = tuple(plain(one.epoch, one.val) for one in run.curve if one.val is not None)
    axes = Axis("epochs", "number", log=False), Axis("loss", "number", log=False)
    yield Plot("Loss in the course of training", "lines", (Series("train", train), Series("val", val)), axes)
    curves = [Series(one.label, tuple(plain(x, y) for x, y in one.points)) for one in run.judged["test"].roc]
    chance = Series("by chance", (plain(0.0, 0.0), plain(1.0, 1.0)), dashed=True)
    axes = Axis("false-positive rate", "number", log=False), Axis("true-positive rate", "number", log=False)
    yield Plot("ROC of held-out slides", "lines", (*curves, chance), axes)


def _metric(run: Finetuning) -> str:
    return "AUROC" if run.classes else "C-index"


def _value(judgement: Judgement) -> Interval | None:
    return judgement.auroc or judgement.c_index


def _cells(interval: Interval | None) -> tuple[str, str]:
    return ("-", "-") if interval is None else (f"{interval.value:.3f}", f"{interval.low:.3f} - {interval.high:.3f}")


REPORT = Report(
    command="dilkit finetune-slide",
    summary=outcome,
    tables=(made_tables,),
    plots=(made_plots,),
    method="{run[tiles]:,} tiles, trained for {run[seconds]:,.0f} s. Intervals hold 95% of {run[settings][resamples]:,} "
    "resamples of a bootstrap over patients. AUROC is over slides, of more than two classes the mean of each against all "
    "others; Harrell's C-index is over patients, each with the mean risk of the patient's slides. Scores are those of the last "
    "epoch. The highest learning rate of the head is {peak_rate:.3g}.",
    notes=lambda result: run_of(result).notes,
)
