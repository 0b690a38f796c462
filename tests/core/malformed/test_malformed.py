"""Tables of malformed calls: each raises the error that names the argument and the limit."""

import pytest
import torch
from core.malformed.attention import CALLS, EXTRAS, MODULES
from core.malformed.commands import COMMANDS
from core.malformed.forms import FORMS
from core.malformed.given import BLOCKS, INTERVALS
from core.malformed.kinds import KINDS
from core.malformed.orders import CODES, CURVES, LOCALITY, ORDERS, POINTS
from core.malformed.patterns import BACKENDS, FACTS, PATTERNS
from core.malformed.ranks import FAULTS, PLANS, RANKS, SHARDS
from core.malformed.scores import SCORES

from dilkit.environment import TUNED, VARIABLES

TABLES = dict(
    call=CALLS,
    scores=SCORES,
    pattern=PATTERNS,
    kinds=KINDS,
    forms=FORMS,
    facts=FACTS,
    module=MODULES,
    extras=EXTRAS,
    order=ORDERS,
    points=POINTS,
    codes=CODES,
    curves=CURVES,
    locality=LOCALITY,
    blocks=BLOCKS,
    intervals=INTERVALS,
    backend=BACKENDS,
    plan=PLANS,
    shards=SHARDS,
    ranks=RANKS,
    faults=FAULTS,
    command=COMMANDS,
)


@pytest.mark.parametrize("part", TABLES)
def test_malformed(part, monkeypatch):
    for variable in VARIABLES:
        if variable is not TUNED:
            monkeypatch.delenv(variable.name, raising=False)
    wrong = {name: complaint(case) for name, case in TABLES[part].items()}
    assert len(wrong) >= 8
    assert not {name: text for name, text in wrong.items() if text}


def complaint(case):
    torch.manual_seed(0)
    try:
        case.call()
    except case.error as error:
        missing = [fragment for fragment in case.fragments if fragment not in str(error)]
        return f"{missing} not in: {error}" if missing else ""
    except Exception as error:
        return f"raised {error!r}"
    return "raised nothing"
