"""A call over ranks in time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.ranks import even_cuts, uneven_cuts
from helpers.strategies import mixes_with_heads, patterns_with_heads
from hypothesis import given, strategies as st

from dilkit import Pattern
from dilkit.comm import Rows, exchange_plan, ring_dilated_attention, run_threads, shard, shard_cuts
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import Forecast, Speed
from dilkit.comm.plan.traffic import leg_bytes
from dilkit.comm.simulation.delivery import Topology, delivered
from dilkit.comm.simulation.simulation import Stragglers, peers, rows_by_pair, simulate

ROWS = Rows(8, "float32", batch=2, key_padding_mask=True)
FAST = Speed(1e12, 1e9)


@given(
    drawn=st.one_of(patterns_with_heads(), mixes_with_heads()),
    seq=st.integers(1, 90),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 3),
    is_causal=st.booleans(),
    schedule=st.sampled_from(["auto", "gather", "ring"]),
    gradients=st.sampled_from(["qkv", "k"]),
)
def test_bytes_from_rank_to_rank_are_those_of_the_plan(drawn, seq, world_size, seed, is_causal, schedule, gradients):
    (pattern, heads), rows = drawn, replace(ROWS, gradients=gradients)
    try:
        plan = exchange_plan(pattern, uneven_cuts(seq, world_size, seed), *heads, is_causal=is_causal, schedule=schedule)
    except ValueError:  # a mix has no such schedule
        return
    tables = rows_by_pair(plan)
    assert not any(table.diagonal().any() for table in tables)
    for phase in PHASES:
        traffic = plan.traffic(phase, rows)
        there, back = leg_bytes(*tables, phase, rows)
        for volume, leg in ((there, traffic.there), (back.T, traffic.back)):
            assert [volume.sum(1).tolist(), volume.sum(0).tolist()] == leg.tolist()


def test_a_port_that_several_send_to_is_shared_and_waits_for_the_last():
    volume = np.zeros((4, 4))
    volume[0, 3], volume[1, 3] = 30.0, 10.0
    found = delivered(np.array([0.0, 1.0, 0.0, 0.0]), volume, Topology(10.0))
    assert found.received.tolist() == [0.0, 1.0, 0.0, 4.0], "its port works from 0 on"
    assert found.sent.tolist() == [3.0, 2.0, 0.0, 0.0]
    assert delivered(np.array([0.0, 9.0, 0.0, 0.0]), volume, Topology(10.0)).received[3] == 10.0, "and then waits"
    assert found.busy == {"ports": 4.0}


def test_hosts_and_uplinks_are_links_of_their_own():
    topology = Topology(10.0, ranks_per_host=2, hosts_per_pod=1, oversubscription=4.0, inside=100.0)
    volume = np.zeros((4, 4))
    volume[0, 1], volume[0, 2], volume[1, 3] = 100.0, 10.0, 10.0
    found = delivered(np.zeros(4), volume, topology)
    assert found.received.tolist() == [0.0, 1.0, 4.0, 4.0], "two ranks share an uplink of 20 / 4 bytes a second"
    assert found.busy == {"within hosts": 1.0, "ports": 1.0, "uplinks": 4.0}
    assert delivered(np.zeros(4), volume, Topology(10.0)).received.tolist() == [0.0, 11.0, 11.0, 1.0]


@pytest.mark.parametrize("schedule", ["auto", "gather", "ring"])
def test_equal_ranks_on_a_flat_network_take_what_the_model_says(schedule):
    pattern = Pattern([32, 128], [1, 1])
    plan = exchange_plan(pattern, even_cuts(128, 4), 4, schedule=schedule)
    for speed in (FAST, Speed(1e5, 1e9)):
        forecast = Forecast(plan, ROWS, speed)
        found = simulate(forecast)
        assert found.compute == pytest.approx(forecast.seconds["compute"])
        assert forecast.seconds["overlapped"].max() * 0.7 <= found.seconds <= forecast.seconds["sequential"].max() * 1.001
        assert found.bottleneck == ("compute" if speed is FAST else "ports")
        assert max(found.busy.values()) <= found.seconds * 1.001
        late = simulate(Forecast(plan, ROWS, replace(speed, latency=1e3)))
        assert late.seconds == pytest.approx(1e3 * sum(forecast.exchanges.values()), rel=0.01)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rings_go_over_the_links_of_hosts_and_pods(is_causal):
    plan = exchange_plan(Pattern([256], [1]), even_cuts(256, 8), 4, schedule="ring", is_causal=is_causal)
    forecast, port = Forecast(plan, ROWS, Speed(1e6, 1e15)), 1e6
    fast, slow = Topology(port, 8, inside=4 * port), Topology(port, 4, hosts_per_pod=1, oversubscription=8.0, inside=4 * port)
    networks = fast, Topology(port), Topology(port, 4, hosts_per_pod=1, inside=port), slow
    times = [(simulate(forecast, network).seconds, peers(forecast, network)["full ring"].seconds) for network in networks]
    for one_host, flat, uplink, slow_uplink in zip(*times, strict=True):
        assert one_host == pytest.approx(flat / 4, rel=0.01)
        assert one_host < uplink <= 1.001 * flat, "the uplink of four ports carries what one rank of each pod sends"
        assert slow_uplink > 1.4 * flat
    assert simulate(forecast, slow).bottleneck == "uplinks"


def test_rows_that_are_not_kept_travel_before_local_work():
    kept, again = (exchange_plan(Pattern([32, 128], [1, 1]), even_cuts(128, 4), 4, keep=keep) for keep in ("rows", "nothing"))
    found = [simulate(Forecast(plan, ROWS, Speed(1e6, 1e9))) for plan in (kept, again)]
    more = (again.traffic("backward", ROWS).sent - kept.traffic("backward", ROWS).sent).max() / 1e6
    assert found[1].busy["ports"] - found[0].busy["ports"] == pytest.approx(more)
    assert found[1].seconds >= found[0].seconds + more


def test_ranks_wait_for_a_slow_one_that_they_need_and_for_no_other():
    alone = exchange_plan(Pattern([32], [1]), even_cuts(128, 4), 2)
    together = exchange_plan(Pattern([128], [1]), even_cuts(128, 4), 4, schedule="scatter")
    for plan, others_wait in ((alone, False), (together, True)):
        forecast = Forecast(plan, ROWS, FAST)
        usual, slow = simulate(forecast), simulate(forecast, stragglers=Stragglers(1, 3.0))
        assert slow.seconds == pytest.approx(3 * usual.seconds, rel=0.01)
        # Before the backward pass all wait for all; in it, the others take a third of the time of the slow one.
        assert (slow.finish[1:].min() > 0.6 * slow.seconds) == others_wait
        assert usual.waiting < 0.01 < 0.4 < slow.waiting


def test_others_move_all_keys_or_all_rows():
    pattern = Pattern([64, 4096], [1, 16])
    plan = exchange_plan(pattern, shard_cuts(4096, 4, pattern), 4)
    computed = peers(Forecast(plan, ROWS, Speed(1e6, 1e15)), Topology(1e6))
    found = {name: peer.seconds for name, peer in computed.items()}
    keys = 2 * 1024 * 4 * ROWS.key_value_bytes
    assert found["all-gather"] == pytest.approx(3 * (2 * keys - 2 * 1024 * 4) / 1e6, rel=1e-3)
    assert found["full ring"] > found["all-gather"] > found["Ulysses"]
    assert all(peer.seconds == pytest.approx(peer.sent / 1e6, rel=1e-3) for peer in computed.values())
    many = exchange_plan(pattern, even_cuts(4096, 16), 4)
    assert "Ulysses" not in peers(Forecast(many, ROWS, FAST), Topology(1e12))


@pytest.mark.parametrize(("schedule", "keep"), [("auto", "rows"), ("gather", "rows"), ("ring", "rows"), ("gather", "nothing")])
def test_exchanges_that_cost_a_latency_are_those_of_a_run(schedule, keep):
    pattern, x = Pattern([8, 32, 64], [1, 2, 4]), torch.randn(1, 64, 4, 8)

    def counted(comm):
        rows, numbers = shard(x, comm, pattern).requires_grad_(), [comm.exchanges]
        out = ring_dilated_attention(rows, rows, rows, pattern, comm, schedule=schedule, keep=keep)
        numbers.append(comm.exchanges)
        out.sum().backward()
        return [numbers[1] - numbers[0], comm.exchanges - numbers[1]]

    plan = exchange_plan(pattern, shard_cuts(64, 4, pattern), 4, schedule=schedule, keep=keep)
    forecast = Forecast(plan, Rows(8, "float32"), Speed(1e9, 1e9, latency=1.0))
    assert run_threads(4, counted)[0] == [forecast.exchanges[phase] for phase in PHASES]
    without = Forecast(plan, Rows(8, "float32"), Speed(1e9, 1e9))
    more = forecast.seconds["overlapped"] - without.seconds["overlapped"]
    assert more.round(6).tolist() == [sum(forecast.exchanges.values())] * 4
