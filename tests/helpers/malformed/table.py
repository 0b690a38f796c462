"""One table of calls that mean nothing. Every message names the argument and the limit. `test_malformed.py` runs the table."""

from __future__ import annotations

from helpers.malformed.attention import CALLS, MODULES
from helpers.malformed.commands import COMMANDS, ENVIRONMENT
from helpers.malformed.forms import FORMS
from helpers.malformed.kinds import KINDS
from helpers.malformed.orders import LOCALITY, ORDERS, POINTS
from helpers.malformed.plug_ins import BACKENDS
from helpers.malformed.ranks import FAULTS, PLANS, RANKS, SHARDS
from helpers.malformed.scores import SCORES
from helpers.malformed.values import FACTS, PATTERNS

TABLE = {
    f"{part}: {name}": case
    for part, cases in dict(
        call=CALLS,
        scores=SCORES,
        pattern=PATTERNS,
        kinds=KINDS,
        forms=FORMS,
        facts=FACTS,
        module=MODULES,
        order=ORDERS,
        points=POINTS,
        locality=LOCALITY,
        backend=BACKENDS,
        plan=PLANS,
        shards=SHARDS,
        ranks=RANKS,
        faults=FAULTS,
        environment=ENVIRONMENT,
        command=COMMANDS,
    ).items()
    for name, case in cases.items()
}
