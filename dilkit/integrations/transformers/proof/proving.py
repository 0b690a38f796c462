"""`python -m dilkit.integrations.transformers.proof.proving MODULE:CLASS`: compare a class of models with eager attention.

Prints the JSON of `check_class`; fails where nothing can be compared.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import warnings

import torch

from dilkit import environment
from dilkit.integrations.newer import full_name
from dilkit.integrations.transformers.proof.trials import compare, first_that_runs
from dilkit.integrations.transformers.registration import classes_with


def main(name: str) -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a class may have parts that it would fetch
    module, _, kind_name = name.partition(":")
    with environment.without_proofs(), warnings.catch_warnings(), torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        kind = getattr(importlib.import_module(module), kind_name)
        compared = compare(first_that_runs(kind, kind.config_class))
    if not compared.layers:
        raise ValueError("none of its layers looks its attention up by name")
    right = [] if compared.wrong else sorted(map(full_name, classes_with(compared.model, compared.layers)))
    print(json.dumps(dict(wrong="; ".join(compared.wrong), doubt="; ".join(compared.refused), right=right)))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # others would wait, at full speed, for models that are this small
    raise SystemExit(main(sys.argv[1]))
