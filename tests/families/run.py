"""Tries every base model and causal language model of transformers, tiny and of random weights, with dilated attention.

    python tests/families/run.py [--only WORD] [--write FILE]

A line for each verdict with how many classes it has, and each class that is wrong. The exit code is 1 if any is. `--write`
writes all as JSON, of which `make docs` makes the tables of docs/transformers.md and docs/results/models.md.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from tqdm import tqdm

from dilkit import Pattern, SlidingWindow, environment
from dilkit.integrations.transformers.proof import trials
from dilkit.integrations.transformers.proof.configurations import configurations
from dilkit.integrations.transformers.proof.trials import DENSE, Tiny, changed, compare, computed, first_that_runs, in_words, same
from dilkit.integrations.transformers.registration import register

EQUAL, WRONG = "equal to eager attention", "WRONG"
NOT_LOOKED_UP = "refused when it is made: it does not look its attention up by name"
REFUSED, NO_ATTENTION, NOT_TRIED = "refused", "has no attention", "not tried"
SECONDS = 90
NAMES = {DENSE: Pattern.dense(), "dilkit_by_head": Pattern([4, 16], [1, 2]), "dilkit_alone": Pattern.of(SlidingWindow(1))}
MEMORY = 6 * 2**30
LARGEST = 2**27
"""The most parameters of a model; a user's process compares smaller ones."""


@dataclass(frozen=True)
class Examined:
    """One class of models. `family`: its `model_type`. `checks`: what equals eager attention.

    `every_layer_asks`: True if no token moves another where each sees itself alone; None where that is not known.
    """

    model: str
    family: str
    verdict: str
    reason: str = ""
    checks: tuple[str, ...] = ()
    every_layer_asks: bool | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="classes whose name has this word")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all as JSON")
    options = parser.parse_args()
    chosen = [one for one in classes() if options.only in one[0]]
    examined = list(tqdm(examine_all(chosen), total=len(chosen), unit="class"))
    if options.write:
        options.write.write_text(report(examined))
    for verdict, count in Counter(one.verdict for one in examined).most_common():
        print(f"{count:5} {verdict}")
    wrong = [f"{one.model}: {one.reason}" for one in examined if one.verdict == WRONG]
    print(*wrong, sep="\n")
    return int(bool(wrong))


def examine_all(chosen: list[tuple[str, str]]) -> Iterator[Examined]:
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=40) as pool:
        yield from pool.imap(_quietly, chosen)


def _quietly(name_and_family: tuple[str, str]) -> Examined:
    import transformers

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a class that cannot be made small is to fail by itself
    transformers.logging.set_verbosity_error()
    return examine(*name_and_family)


def report(examined: list[Examined]) -> str:
    import transformers

    versions = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    classes = ",\n".join(json.dumps(asdict(one)) for one in examined)
    return f'{{"versions": {versions}, "classes": [\n{classes}\n]}}\n'


def examine(name: str, family: str) -> Examined:
    import transformers

    trials.LARGEST = LARGEST
    from_family = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for attention, pattern in NAMES.items():
        register(pattern, attention)
    with _limit(SECONDS), environment.without_proofs(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            kind = getattr(transformers, name)
            config_kind = kind.config_class or from_family[family]
            if _is_refused(kind, config_kind):
                return Examined(name, family, NOT_LOOKED_UP)
            return _verdict(name, family, first_that_runs(kind, config_kind))
        except (Exception, TooLate) as error:
            return Examined(name, family, NOT_TRIED, in_words(error))


def _is_refused(kind, config_kind) -> bool:
    config = next(configurations(config_kind))
    config._attn_implementation = DENSE
    try:
        with torch.device("meta"):
            kind(config)
    except Exception as error:
        return "does not look its attention up by name" in str(error)
    return False


def _verdict(name: str, family: str, tiny: Tiny) -> Examined:
    try:
        compared = compare(tiny)
        computed(tiny.other("dilkit_by_head"), tiny.inputs)
    except Exception as error:
        return Examined(name, family, REFUSED, in_words(error))
    if not compared.layers:
        return Examined(name, family, NO_ATTENTION)
    if compared.wrong:
        return Examined(name, family, WRONG, "; ".join(compared.wrong))
    return Examined(name, family, EQUAL, "; ".join(compared.refused), tuple(compared.equal), _every_layer_asks(tiny))


def _every_layer_asks(tiny: Tiny) -> bool | None:
    if "input_ids" not in tiny.inputs or "decoder_input_ids" in tiny.inputs:
        return None
    model = tiny.other("dilkit_alone")
    try:
        before, after = (computed(model, inputs) for inputs in (tiny.inputs, changed(tiny.inputs, 3)))
    except Exception:
        return None
    if before.dim() < 3 or before.shape[1] != tiny.inputs["input_ids"].shape[1]:
        return None
    rows = torch.arange(before.shape[1]) != 3
    return same(after[:, rows], before[:, rows])


class TooLate(BaseException):
    """Not an Exception, which some classes catch."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def late(*_):
        raise TooLate(f"it takes more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@cache
def classes() -> tuple[tuple[str, str], ...]:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, str] = {}
    for family in CONFIG_MAPPING:
        for table in tables:
            names = table.get(family, ())
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, family)
    return tuple(found.items())


if __name__ == "__main__":
    sys.exit(main())
