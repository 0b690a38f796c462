"""The figures of docs/many-ranks.md: a billion tokens on many GPUs, simulated anew whenever the page is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.forecast import Forecast, Speed
from dilkit.comm.simulation.peers import Peer, peers
from dilkit.comm.simulation.simulation import Simulated, Stragglers, simulate
from dilkit.comm.simulation.topology import Topology
from dilkit.pattern import Pattern
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Plot, Point, Series
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import write_png

SEQ = 10**9
PATTERN = Pattern([2048 * 4**i for i in range(10)], [4**i for i in range(10)])
HEADS, KV_HEADS, ROWS = 32, 8, Rows(128, "bfloat16")
SPEED = Speed(bandwidth=50e9, flops=400e12, latency=20e-6)
TOPOLOGY = Topology(SPEED.bandwidth, ranks_per_host=8, hosts_per_pod=32, oversubscription=2.0, inside=450e9)
RANKS, DRAWN = 1024, (32, 64, 128, 256, 512, 1024)
SLOW = Stragglers(8, 1.5)
PEERS = ("full ring", "all-gather")
"""Those that are drawn: Ulysses divides heads, of which there are fewer than ranks."""


@dataclass(frozen=True)
class ManyRanks:
    """The problem on so many ranks."""

    ranks: int

    @cached_property
    def forecast(self) -> Forecast:
        """By the schedule that is chosen."""
        plan = exchange_plan(PATTERN, shard_cuts(SEQ, self.ranks, PATTERN), HEADS, KV_HEADS, is_causal=True)
        return Forecast(plan, ROWS, SPEED)

    @cached_property
    def simulated(self) -> Simulated:
        """In time."""
        return simulate(self.forecast, TOPOLOGY)

    @cached_property
    def peers(self) -> dict[str, Peer]:
        """Other ways."""
        return peers(self.forecast, TOPOLOGY)


@lru_cache
def _many(ranks: int) -> ManyRanks:
    return ManyRanks(ranks)


def assumptions(root: Path) -> str:
    """What the page goes by, a line each."""
    t, pods = TOPOLOGY, (TOPOLOGY.hosts_per_pod or 0) * TOPOLOGY.ranks_per_host
    gigabytes = [f"{rate / 1e9:,.0f} GB/s each way" for rate in (t.within_host, t.bandwidth)]
    lines = (
        f"{SEQ:,} tokens, one layer, causal, forward and backward, by `{PATTERN}`",
        f"{HEADS} query and {KV_HEADS} key/value heads of {ROWS.head_dim}, {ROWS.dtype}",
        f"a GPU computes {SPEED.flops / 1e12:,.0f} TFLOP/s of nominal operations, and a backward pass takes {SPEED.backward:g} "
        "times as long as a forward pass; both are assumed, not measured: replace them by measured numbers",
        f"{t.ranks_per_host} GPUs are a host, with {gigabytes[0]} within it and {gigabytes[1]} from each GPU to other hosts",
        f"{pods} GPUs are below an uplink, which carries 1/{t.oversubscription:g} of what they could send; nothing else limits",
        f"an exchange takes {1e6 * SPEED.latency:,.0f} us at the least",
        "others compute the same pattern, shared out evenly, and hide what they send as far as it fits under that",
    )
    return "\n".join(f"- {line}" for line in lines)


def table(root: Path) -> str:
    """One row a way to compute it on `RANKS` ranks: time, bytes, what is held of other ranks, and what works longest."""
    many = _many(RANKS)
    slow, plan = simulate(many.forecast, TOPOLOGY, SLOW), many.forecast.plan
    sent = sum(int(traffic.sent.max()) for traffic in many.forecast.traffic.values())
    held = int(many.forecast.memory["exchange buffers"].max())
    rows: list[Sequence[str]] = [("", "time", "a GPU sends", "it holds of others' rows", "longest at work")]
    rows.append(("dilkit, `auto`", in_seconds(many.simulated.seconds), in_bytes(sent), in_bytes(held), many.simulated.bottleneck))
    name = f"the same, {SLOW.count} GPUs {SLOW.slowdown:g} times slower"
    rows.append((name, in_seconds(slow.seconds), in_bytes(sent), in_bytes(held), slow.bottleneck))
    for name in PEERS:
        peer = many.peers[name]
        rows.append((name, in_seconds(peer.seconds), in_bytes(peer.sent), in_bytes(peer.held), ""))
    rows.append((f"Ulysses: refused, {plan.heads} heads cannot be divided among {RANKS:,} ranks", "", "", "", ""))
    return rows_markdown(rows)


def draw(path: Path) -> None:
    """Time by the number of GPUs."""
    many = [_many(ranks) for ranks in DRAWN]
    times = {"dilkit, auto": [one.simulated.seconds for one in many]}
    times |= {peer: [one.peers[peer].seconds for one in many] for peer in PEERS}
    lines = tuple(Series(name, _points(seconds)) for name, seconds in times.items())
    axes = Axis("GPUs", "number"), Axis("time, forward and backward", "seconds")
    write_png([Plot("A billion tokens, simulated", "lines", lines, axes)], path)


def _points(seconds: Sequence[float]) -> tuple[Point, ...]:
    return tuple(Point(ranks, y, y, y) for ranks, y in zip(DRAWN, seconds, strict=True))
