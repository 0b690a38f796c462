"""State between steps, and the steps by name: `do` names a function in `steps/`, the rest are its arguments."""

import copy
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from fuzz.steps import decoding, malformed, modules, orders, passes, ranks, single

from dilkit import plan

Step = dict[str, Any]


def _defined_in(module: ModuleType) -> dict[str, Callable[..., None]]:
    functions = {name: x for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__}
    return {name: x for name, x in functions.items() if callable(x) and not name.startswith("_") and name.islower()}


STEPS = {
    name: step
    for module in (single, passes, malformed, orders, ranks, modules, decoding)
    for name, step in _defined_in(module).items()
}


class World:
    def __init__(self):
        self.pending: list[passes.Pending] = []
        self.compared = 0
        self.before = dict(os.environ)
        self.threads = torch.get_num_threads()
        plan.cache_clear()

    def close(self):
        torch.set_num_threads(self.threads)
        for name in os.environ.keys() - self.before.keys():
            del os.environ[name]
        os.environ.update(self.before)

    def perform(self, step: Step):
        step = copy.deepcopy(step)
        STEPS[step.pop("do")](self, **step)
