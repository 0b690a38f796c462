"""A pytest plugin: models of transformers compute dilkit's attention where they would sdpa's, and each outcome goes into a file.

    pytest -p families.swap --attention dilkit --outcomes FILE tests/models/llama

`own_tests.py` starts it twice, with sdpa and with dilkit, and compares both files.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from families.own_tests import FAILED, PASSED, SKIPPED, Outcome

import dilkit
from dilkit import Pattern
from dilkit.integrations.transformers import registration
from dilkit.integrations.transformers.patterns import has_windows

NAME, WINDOWED = "dilkit", "dilkit_windows"
PACKAGE = Path(dilkit.__file__).parent
LONGEST = 500
"""Characters of an exception's message that are kept."""
PRECEDENCE = (FAILED, SKIPPED, PASSED)
"""A test has several reports (setup, call, teardown, subtests): the first of these that one of them has is its outcome."""


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("dilkit")
    group.addoption("--attention", choices=["sdpa", NAME], default=NAME, help="the attention in the place of sdpa")
    group.addoption("--outcomes", type=Path, default=Path(os.devnull), help="the file that gets a line of JSON for each test")


def pytest_configure(config: Any) -> None:
    file = config.stash[_FILE] = config.getoption("outcomes").open("w", encoding="utf-8", buffering=1)
    config.add_cleanup(file.close)
    if config.getoption("attention") == NAME:
        swap = swapped()
        swap.__enter__()
        config.add_cleanup(lambda: swap.__exit__(None, None, None))
    config.pluginmanager.register(_Recorder(file))


_FILE: pytest.StashKey[Any] = pytest.StashKey()
_calls: Counter[str] = Counter()


@contextmanager
def swapped() -> Iterator[None]:
    """Registers dilkit's attention, dense or by a model's own windows, and decides for it in place of sdpa and of the default."""
    package, attend = registration.transformers(), registration.attend

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _calls[NAME] += 1
        return attend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "attend", counted)  # also what `is_registered` compares with
        registration.register(Pattern.dense(), NAME)
        registration.register(None, WINDOWED)
        decide = package.PreTrainedModel.get_correct_attn_implementation

        def decided(model: Any, requested: str | None, *args: Any, **kwargs: Any) -> Any:
            name = decide(model, requested, *args, **kwargs)
            if requested is not None and name != "sdpa":
                return name
            return decide(model, WINDOWED if has_windows(model.config) else NAME)

        patch.setattr(package.PreTrainedModel, "get_correct_attn_implementation", decided)
        yield


class _Recorder:
    """Collects the reports of each test and writes its outcome when it has ended."""

    def __init__(self, file: Any) -> None:
        self.file, self.outcome = file, Outcome("")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome = Outcome(nodeid)
        _calls.clear()
        _seed()

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = min(self.outcome.outcome, report.outcome, key=PRECEDENCE.index)
        if outcome == self.outcome.outcome or (outcome == SKIPPED and hasattr(report, "context")):  # other subtests may pass
            return
        self.outcome.outcome = outcome
        self.outcome.error, self.outcome.refused = _error(report.longrepr)

    def pytest_runtest_logfinish(self) -> None:
        self.outcome.calls = _calls[NAME]
        print(json.dumps(asdict(self.outcome)), file=self.file)


def _seed() -> None:
    """Draw the same random numbers in both runs, those of transformers' generator for inputs among them."""
    random.seed(0)
    torch.manual_seed(0)
    for name, module in list(sys.modules.items()):
        if name.endswith("test_modeling_common"):
            module.global_rng.seed(0)


def _error(longrepr: Any) -> tuple[str, bool]:
    """The messages of a failure's exceptions, with the line that raised the last one; and whether dilkit raised one of them."""
    chain = getattr(longrepr, "chain", ())
    crashes = [crash for _, crash, _ in chain if crash is not None]
    if not crashes:
        return str(longrepr), False
    messages = [" ".join(crash.message.split())[:LONGEST] for crash in reversed(crashes)]
    lines = (line.strip("> ^") for line in reversed(chain[-1][0].reprentries[-1].lines) if not line.startswith("E"))
    return f"{' <- '.join(messages)} [{next(filter(None, lines))}]", any(PACKAGE in Path(crash.path).parents for crash in crashes)
