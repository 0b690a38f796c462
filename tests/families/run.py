"""Tries every base model and causal language model of transformers, tiny and of random weights, with dilated attention.

    python tests/families/run.py [--only WORD] [--write FILE] [--json]

A line for each verdict with how many classes it has, and each class that is wrong. The exit code is 1 if any is. `--write`
writes all as JSON, of which `make docs` makes the table of docs/transformers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

from families.examine import WRONG, Examined, classes, examine
from tqdm import tqdm

MEMORY = 6 * 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="classes whose name has this word")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all as JSON")
    parser.add_argument("--json", action="store_true", help="print all as JSON")
    options = parser.parse_args()
    chosen = [one for one in classes() if options.only in one[0]]
    examined = list(tqdm(examine_all(chosen), total=len(chosen), unit="class"))
    text = report(examined)
    if options.write:
        options.write.write_text(text)
    print(text if options.json else summary(examined))
    return int(any(one.verdict == WRONG for one in examined))


def examine_all(chosen: list[tuple[str, str]]) -> Iterator[Examined]:
    """Each class in turn, in processes that are ended before they have grown large."""
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=40) as pool:
        yield from pool.imap(_quietly, chosen)


def _quietly(name_and_family: tuple[str, str]) -> Examined:
    import transformers

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a class that cannot be made small is to fail by itself
    transformers.logging.set_verbosity_error()
    return examine(*name_and_family)


def report(examined: list[Examined]) -> str:
    """All that was found, and the versions that it holds for, as JSON: a line for each class."""
    import torch
    import transformers

    versions = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    classes = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in examined)
    return f'{{"versions": {versions}, "classes": [\n{classes}\n]}}\n'


def summary(examined: list[Examined]) -> str:
    counts = Counter(one.verdict for one in examined)
    lines = [f"{count:5} {verdict}" for verdict, count in counts.most_common()]
    lines += [f"{one.model}: {one.reason}" for one in examined if one.verdict == WRONG]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
