"""The figures of docs/many-ranks.md, which lists these assumptions: a billion tokens on many GPUs, simulated."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.forecast import Forecast, Speed
from dilkit.comm.simulation.delivery import Topology
from dilkit.comm.simulation.simulation import Stragglers, peers, simulate
from dilkit.pattern import Pattern
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Plot, Point
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.report.picture import write_png
from dilkit.tools.report.points import plain, series_of

SEQ = 10**9
PATTERN = Pattern([2048 * 4**i for i in range(10)], [4**i for i in range(10)])
HEADS, KV_HEADS, ROWS = 32, 8, Rows(128, "bfloat16")
SPEED = Speed(bandwidth=50e9, flops=400e12, latency=20e-6)
TOPOLOGY = Topology(SPEED.bandwidth, ranks_per_host=8, hosts_per_pod=32, oversubscription=2.0, inside=450e9)
RANKS, DRAWN = 1024, (64, 128, 256, 512, 1024)
SLOW = Stragglers(8, 1.5)


@cache
def forecast_of(ranks: int) -> Forecast:
    """Return the forecast of the problem on so many ranks, by the schedule that is chosen."""
    plan = exchange_plan(PATTERN, shard_cuts(SEQ, ranks, PATTERN), HEADS, KV_HEADS, is_causal=True)
    return Forecast(plan, ROWS, SPEED)


def table(root: Path) -> str:
    """Return a row for each schedule and peer on `RANKS` ranks: time, bytes sent, bytes held, and the busiest resource."""
    forecast = forecast_of(RANKS)
    sent = sum(int(traffic.sent.max()) for traffic in forecast.traffic.values())
    held = int(forecast.memory["exchange buffers"].max())
    rows: list[Sequence[str]] = [("", "time", "a GPU sends", "it holds of others' rows", "longest at work")]
    slowed = {"dilkit, `auto`": Stragglers(), f"the same, {SLOW.count} GPUs {SLOW.slowdown:g} times slower": SLOW}
    for name, stragglers in slowed.items():
        simulated = simulate(forecast, TOPOLOGY, stragglers)
        rows.append((name, in_seconds(simulated.seconds), in_bytes(sent), in_bytes(held), simulated.bottleneck))
    for name, peer in peers(forecast, TOPOLOGY).items():
        rows.append((name, in_seconds(peer.seconds), in_bytes(peer.sent), in_bytes(peer.held), ""))
    return rows_markdown(rows)


def draw(path: Path) -> None:
    points: dict[str, list[Point]] = {}
    for ranks in DRAWN:
        forecast = forecast_of(ranks)
        times = {name: peer.seconds for name, peer in peers(forecast, TOPOLOGY).items()}
        for name, seconds in {"dilkit, auto": simulate(forecast, TOPOLOGY).seconds, **times}.items():
            points.setdefault(name, []).append(plain(ranks, seconds))
    axes = Axis("GPUs", "number"), Axis("time, forward and backward", "seconds")
    write_png([Plot("A billion tokens, simulated", "lines", series_of(points), axes)], path)
