"""What attention sends in a step of the training, by the exchange plan."""

from __future__ import annotations

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import baselines
from dilkit.tools.demo.ranks.layout import Layout
from dilkit.tools.demo.ranks.record import Sent, StepBytes
from dilkit.tools.demo.text.model import ModelConfig


def planned(config: ModelConfig, layout: Layout) -> Sent:
    """The bytes of a step, by branch on the rank that sends most, and in all by rank of a sequence."""
    cuts = shard_cuts(config.context, layout.sequence, config.pattern)
    plan = exchange_plan(config.pattern, cuts, config.heads, is_causal=True)
    rows = Rows(config.width // config.heads, "float32")
    everything = [
        sum(config.layers * int(plan.traffic(phase, rows).sent[rank]) for phase in PHASES) for rank in range(len(cuts) - 1)
    ]
    busiest = max(range(layout.sequence), key=everything.__getitem__)
    segments = zip(config.pattern.segment_lengths, config.pattern.dilation_rates, strict=True)
    branches = []
    for i, (length, rate) in enumerate(segments):
        sent = {phase: config.layers * int(plan.traffic(phase, rows, i).sent[busiest]) for phase in PHASES}
        name = f"{length:,} bytes" + f", 1 in {rate}" * (rate > 1)
        branches.append(StepBytes(name=name, route=plan.routes[i].kind, **sent))
    ring = config.layers * baselines(plan, rows)["full_ring"]
    # Keys and values there, their gradients back: the least. A ring that passes rows round again in the backward pass sends more.
    full = StepBytes(name="all keys and values", route="ring", forward=ring, backward=ring)
    return Sent(rank=busiest, branches=tuple(branches), full_ring=full, planned=tuple(everything))
