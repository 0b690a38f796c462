"""`dilkit predict-slide`: classes or risks of new slides, by a model that `dilkit finetune-slide` has trained."""

import argparse
import contextlib
import csv
import io
import json
import sys
from pathlib import Path

from dilkit import environment, files
from dilkit.tools.commands import encode_slide
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json, table

HELP = """\
predict classes or risks of new slides, by a model that finetune-slide has trained

Reads files of tile features, as encode-slide does, and as --checkpoint the model.pt that finetune-slide wrote. Writes
predictions.csv into --out, a line a slide: its tiles, the class, and the probability of each class; of survival the risk, a
logarithm of a relative hazard. Beside it are the files that encode-slide writes.

  dilkit predict-slide features/ --checkpoint mutation/model.pt --out predicted
  dilkit predict-slide slide.h5 --checkpoint mutation/model.pt --out predicted --heatmap"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "the model.pt that dilkit finetune-slide wrote"
    encode_slide.add_arguments(parser, model, "folder of predictions.csv and of the embeddings", layers=False)
    parser.set_defaults(named="predict-slide")


def run(args: argparse.Namespace) -> int:
    load_torch()
    from dilkit.integrations.gigapath.checkpoint import load_tensors, local_file
    from dilkit.integrations.gigapath.cohort.manifest import NAME, read_manifest
    from dilkit.integrations.gigapath.features import features_in
    from dilkit.integrations.gigapath.finetuning.model import load_head
    from dilkit.tools.commands.encode_processes import job_of

    head, (job, _) = load_head(local_file(args.checkpoint)), job_of(args)
    as_json, args.json = args.json, False
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        code = encode_slide.run(args)
    if (started := environment.launch()) is not None and started.rank:
        return 0  # else the launcher stops the first rank, whose work goes on, and whose exit code says the same
    refused = json.loads((args.out / NAME).read_bytes())["refused"]  # an earlier file of that name may have a record
    named, rows = {path.name for path in features_in(args.features)} - {Path(one["file"]).name for one in refused}, []
    for record in read_manifest(args.out, job.model).slides.values():
        if Path(record.file).name in named:
            numbers = head.predict(load_tensors(args.out / record.output)["embedding"])
            best = (head.classes[numbers.index(max(numbers))],) if head.classes else ()
            rows.append((record.output.removesuffix(".pt"), record.tiles, *best, *numbers))
    header = ("slide", "tiles", *(("label",) if head.classes else ()), *head.columns)
    path, text = args.out / "predictions.csv", io.StringIO(newline="")
    csv.writer(text).writerows([header, *sorted(rows)])
    with files.replacing(path) as file:
        file.write(text.getvalue().encode())
    if as_json:
        predictions = [dict(zip(header, row, strict=True)) for row in sorted(rows)]
        print_json("predict-slide", {"predictions": predictions, "refused": refused})
    else:
        shown = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (header, *sorted(rows))]
        print("\n".join(table(shown)), f"wrote {path}", sep="\n")
    return code
