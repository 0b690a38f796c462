"""`dilkit draw`: the count matrix of a pattern, in the terminal and as a picture."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from dilkit.tools.console.arguments import add_pattern_arguments, pattern_of, picture_file
from dilkit.tools.console.interrupt import load_torch
from dilkit.tools.console.text import print_json, wrapped
from dilkit.viz import count_text, draw_count
from dilkit.viz.counts import LABELS

HELP = "draw the count matrix of a pattern: how many times each query sees each key"
KEPT_LABELS = ("after token", "key", "branches that keep it")
MAX_SEQ, MAX_HEADS = 2048, 64
"""Beyond these a cell or a head is less than can be seen in a picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pattern_arguments(parser, seq=64, heads=4, segments=(16, 32, 64))
    out = "draw into a file instead: .png, .svg or .pdf (needs matplotlib)"
    parser.add_argument("--kept", action="store_true", help="draw what a DilatedCache keeps after each token instead")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help=out)


def run(args: argparse.Namespace) -> int:
    """Draw in the terminal or, with --out, into a file. Raises ValueError for what cannot be drawn."""
    for name, value, limit in (("--seq", args.seq, MAX_SEQ), ("--heads", args.heads, MAX_HEADS)):
        if value > limit:
            raise ValueError(f"{name}: {value} is more than a picture can show; at most {limit}")
    pattern = pattern_of(args)
    if args.kept and (args.causal or pattern.heads is not None):
        raise ValueError("--kept: is always causal and for all heads; leave out --causal and ranges of heads")
    if args.out:
        picture_file("--out", args.out)
    load_torch()
    if args.kept:
        from dilkit.decoding.stores import kept_count

        count = kept_count(pattern, args.seq, args.kv_heads or args.heads)
    else:
        count = pattern.count(args.seq, args.heads, kv_heads=args.kv_heads, is_causal=args.causal)
    kind = ", causal" if args.causal else ", kept" if args.kept else ""
    grouped = f" over {args.kv_heads} key/value heads" if args.kv_heads else ""
    title = f"{pattern}, {args.seq} tokens, {args.heads} head{'s' * (args.heads > 1)}{grouped}{kind}"
    if args.out:
        from dilkit.tools.report.picture import new_figure, save

        with new_figure() as figure:
            labels = KEPT_LABELS if args.kept else LABELS
            draw_count(figure, count, title, is_causal=args.causal or args.kept, labels=labels)
            save(figure, args.out, dpi=280)
    if args.json:
        call = dict(seq=args.seq, heads=args.heads, kv_heads=args.kv_heads or args.heads, is_causal=args.causal)
        seen = dict(largest=int(count.max()), share_seen=int((count > 0).sum()) / count.numel(), count=count.tolist())
        report = dict(pattern=json.loads(pattern.to_json()), **call, out=str(args.out) if args.out else None, **seen)
        print_json("draw", report)
    elif args.out:
        print(f"wrote {args.out}")
    else:
        room = shutil.get_terminal_size((100, 24)).columns
        print(*wrapped("", title), sep="\n")
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(count_text(count, room, colours=coloured, down="tokens" if args.kept else "queries"))
    return 0
