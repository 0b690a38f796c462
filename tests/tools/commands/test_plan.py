"""`dilkit plan`."""

import argparse
import re

import pytest
from helpers.command_line import json_output

from dilkit import Pattern
from dilkit.comm import Rows, exchange_plan, shard_cuts
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.forecast import Speed, exchange_buffer_bytes
from dilkit.device import probe
from dilkit.tools import cli
from dilkit.tools.commands.plan import SpeedsResult
from dilkit.tools.console.arguments import bandwidth, flops, whole
from dilkit.tools.results.file import new_result, write_result

MIB = 2**20
CONFIGURATIONS = {
    "unaligned": "--seq 97 --segments 8,24,97 --rates 1,3,5 --heads 4 --dim 8 --dtype fp32 --world-size 3",
    "causal, grouped heads": "--seq 96 --segments 16,48,96 --rates 1,2,4 --heads 6 --kv-heads 2 --dim 4 --dtype fp64 "
    "--world-size 4 --causal --batch 2",
    "masked": "--seq 60 --segments 10,60 --rates 2,3 --heads 2 --dim 8 --dtype bf16 --world-size 5 --mask --batch 2",
    "fewer heads than ranks": "--seq 64 --segments 64 --rates 1 --heads 2 --dim 8 --dtype fp32 --world-size 6 --causal",
    "block offsets, head ranges": "--seq 50 --pattern head_split([7,50],[2,4],4,'block') --heads 4 --dim 8 --dtype fp32 "
    "--world-size 4",
    "one rank": "--seq 20 --segments 8 --rates 1 --heads 2 --dim 8 --dtype fp32 --world-size 1",
    "nothing kept": "--seq 96 --segments 16,48,96 --rates 1,2,4 --heads 4 --dim 4 --dtype fp32 --world-size 4 --keep nothing "
    "--schedule auto",
    "keys that count once": "--seq 64 --pattern Pattern([16,32],[1,2],overlap='once') --heads 4 --dim 8 --dtype fp32 "
    "--world-size 3",
}


def planned(capsys, options):
    return json_output(capsys, "plan", *options.split())


def pattern_in(text):
    return eval(text, {"Pattern": Pattern})


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=list(CONFIGURATIONS))
def test_numbers_are_those_of_the_plan(capsys, options):
    """A run counts what a plan has, as tests/comm shows."""
    report = planned(capsys, options)
    p, pattern = report["problem"], pattern_in(report["problem"]["pattern"])
    call = dict(batch=p["batch"], kv_heads=p["kv_heads"], is_causal=p["is_causal"])
    work, keep = pattern.flops(p["seq"], p["heads"], p["head_dim"], **call), "nothing" if "--keep nothing" in options else "rows"
    rows = Rows(p["head_dim"], p["dtype"], p["batch"], p["key_padding_mask"])
    cuts = shard_cuts(p["seq"], p["world_size"], pattern)
    for schedule, facts in report["schedules"].items():
        by_rank = facts["by_rank"]
        plan = exchange_plan(pattern, cuts, p["heads"], p["kv_heads"], is_causal=p["is_causal"], schedule=schedule, keep=keep)
        for phase in PHASES:
            sent = plan.traffic(phase, rows).sent.tolist()
            assert by_rank[f"{phase}_bytes"] == sent, schedule
            assert facts["sent_bytes"][phase] == dict(min=min(sent), mean=sum(sent) / len(sent), max=max(sent))
        assert sum(by_rank["flops"]) == work, schedule
        assert facts["flops"]["max"] == max(by_rank["flops"])
        if schedule != "ring":
            assert by_rank["exchange_bytes"] == exchange_buffer_bytes(plan, rows).tolist()
            assert by_rank["kept_bytes"] == (by_rank["exchange_bytes"] if keep == "rows" else [0] * p["world_size"])


def test_times_are_those_of_the_formula_and_local_work_hides_what_travels(capsys):
    options = "--seq 4096 --segments 4096 --rates 1 --heads 4 --dim 8 --dtype fp32 --world-size 4 --schedule gather"
    found = planned(capsys, f"{options} --bandwidth 1MB/s --flops 1G")["schedules"]["gather"]
    seconds, sent = found["seconds"], sum(max(found["by_rank"][f"{phase}_bytes"]) for phase in PHASES)
    assert seconds["compute"] == pytest.approx(3.5 * 4 * 8 * 4 * 1024 * 4096 / 1e9)
    assert seconds["communication"] == pytest.approx(sent / 1e6)  # each receives as much as it sends
    assert seconds["overlapped"] == pytest.approx(seconds["sequential"])  # nothing is local: all of it waits for rows
    hidden = planned(capsys, "--seq 1M --causal --heads 8 --dim 64 --schedule scatter")["schedules"]["scatter"]["seconds"]
    assert hidden["compute"] < hidden["overlapped"] < hidden["sequential"]


def test_the_worked_example(capsys):
    """A million tokens on eight ranks: one branch is sharded, over four ranks, with 512 rows a head of 128 bytes on each."""
    report = planned(capsys, "--seq 1M --world-size 8 --heads 8 --dim 64 --causal")
    assert report["problem"]["pattern"] == "Pattern([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])"
    sent = 4 * 3 / 4 * 0.5 * MIB + 4 * 3 / 4 * 512 * 8
    auto = report["schedules"]["auto"]
    assert [branch["route"] for branch in auto["branches"]] == ["local"] * 4 + ["scatter"]
    assert auto["sent_bytes"]["forward"]["max"] == sent
    assert auto["branches"][4]["busiest"] == {"4": 12288, "2": 16384, "1": 24576}
    assert auto["flops"]["balance"] == 1.0
    assert report["baselines"]["full_ring"]["forward_bytes"] == 1792 * MIB
    assert report["baselines"]["segment_all_gather"]["forward_bytes"] == 3 * MIB
    assert report["choice"] == "auto: 4 local, 1 scatter"


def test_a_plan_that_would_not_end_is_refused(capsys):
    """Query heads make none too large: 256 ranks times as many are twice the most entries."""
    many_branches = f"--heads 2 --world-size 1100 --segments 8{',8' * 999} --rates 1{',1' * 999}"
    for options in ("--heads 1e6", "--world-size 1e6 --seq 1e9", many_branches):
        assert cli.main(["plan", *options.split()]) == 2
        assert re.search(r"--ranks [\d,]+ with .* branches is too large a plan; .*2,097,152", capsys.readouterr().err)
    job = "--world-size 256 --segments 4096 --rates 1 --kv-heads 1"
    few, many = (planned(capsys, f"{job} --heads {heads}")["schedules"]["auto"]["flops"] for heads in (4, 2**14))
    assert many["max"] == few["max"] * 2**12


def test_a_simulation_is_of_the_links_that_are_given(capsys):
    links = "--ranks-per-host 2 --hosts-per-pod 1 --oversubscription 2 --inside 90GB/s --stragglers 1"
    given = f"--simulate --world-size 4 --seq 4K --segments dense --rates 1 {links}"
    found = planned(capsys, given)["simulated"]
    assert set(found["schedules"]) == {"auto", "balanced", "scatter", "gather", "ring"}
    assert set(found["schedules"]["auto"]["busy_seconds"]) == {"compute", "within hosts", "ports", "uplinks"}
    assert (found["topology"]["inside"], found["stragglers"]["count"]) == (9e10, 1)
    for options in ("--stragglers 2", "--simulate --oversubscription 2"):
        assert cli.main(["plan", *options.split()]) == 2
        assert re.search("; add --", capsys.readouterr().err)


def test_measured_speeds_are_taken_from_their_file(tmp_path, capsys):
    speed, file = Speed(bandwidth=2e9, flops=3e12, latency=0.5, backward=4.0), tmp_path / "speeds.json"
    write_result(new_result(SpeedsResult, probe("cpu"), problem="", ranks=2, speed=speed), file)
    report = planned(capsys, f"--seq 64 --segments 64 --rates 1 --world-size 2 --speeds {file}")
    assert {name: report[name] for name in vars(speed)} == vars(speed)
    for options, said in (
        (f"--speeds {file} --flops 1T", "--flops: does not go with --speeds"),
        ("--calibrate s.json", "mpirun"),
    ):
        assert cli.main(["plan", *options.split()]) == 2
        assert said in capsys.readouterr().err


def test_numbers_as_people_write_them():
    sizes = {"1e9": 10**9, "1G": 2**30, "64K": 2**16, "1.5k": 1536, "1,048,576": 2**20, "65_536": 65536, " 7 ": 7}
    assert {text: whole(1)(text) for text in sizes} == sizes
    for text in ("1.5", "1,04", "1e-3", "", "x", "-1", "1/2", "1e999"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            whole(0)(text)
    speeds = {"50GB/s": 5e10, "400Gbit/s": 5e10, "400Gbps": 5e10, "1GiB/s": 2.0**30, "5e10": 5e10, "1.5MB/s": 1.5e6}
    assert {text: bandwidth(text) for text in speeds} == speeds
    rates = {"400T": 4e14, "9.7e12": 9.7e12, "1.2P": 1.2e15, "989 TFLOP/s": 989e12}
    assert {text: flops(text) for text in rates} == rates
