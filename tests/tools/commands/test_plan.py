"""`dilkit plan` says beforehand what a run then counts: bytes, work, and rows held for the backward pass."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers.command_line import json_output, output

from dilkit import Pattern, dilated_attention
from dilkit.comm import ExchangePlan, Rows, exchange_plan, ring_dilated_attention, run_threads, shard, shard_cuts
from dilkit.comm.passes.all_to_all.index_tables import index_tables
from dilkit.comm.passes.ring.segment import ring_segments
from dilkit.comm.plan.buffer_bytes import exchange_buffer_bytes, ring_buffer_bytes
from dilkit.comm.plan.exchange_plan import PHASES
from dilkit.comm.plan.routes import SCHEDULES
from dilkit.comm.transports.base import Comm
from dilkit.tools.cli import main
from dilkit.tools.console.quantities import bandwidth, flops, whole_number

MIB = 2**20

CONFIGURATIONS = {
    "unaligned": "--seq 97 --segments 8,24,97 --rates 1,3,5 --heads 4 --dim 8 --dtype fp32 --world-size 3",
    "causal, grouped heads": "--seq 96 --segments 16,48,96 --rates 1,2,4 --heads 6 --kv-heads 2 --dim 4 --dtype fp64 "
    "--world-size 4 --causal --batch 2",
    "masked": "--seq 60 --segments 10,60 --rates 2,3 --heads 2 --dim 8 --dtype bf16 --world-size 5 --mask --batch 2",
    "fewer heads than ranks": "--seq 64 --segments 64 --rates 1 --heads 2 --dim 8 --dtype fp32 --world-size 6 --causal",
    "block offsets, head ranges": "--seq 50 --segments 7,50 --rates 2,4 --heads 4 --dim 8 --dtype fp32 --world-size 4 "
    "--offset block --head-split",
    "one rank": "--seq 20 --segments 8 --rates 1 --heads 2 --dim 8 --dtype fp32 --world-size 1",
    "keys that count once": "--seq 64 --segments 16,32 --rates 1,2 --heads 4 --dim 8 --dtype fp32 --world-size 3 --overlap once",
}


def planned(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    return json_output(capsys, "plan", *options.split())


def counted(problem: dict[str, Any], pattern: Pattern, schedule: str) -> dict[str, list[int]]:
    """Bytes that the ranks of a real call send, by phase."""
    batch, seq, d, dtype = (problem[name] for name in ("batch", "seq", "head_dim", "dtype"))
    sizes = [(batch, seq, problem[name], d) for name in ("heads", "kv_heads", "kv_heads")]
    inputs = [torch.randn(size, dtype=getattr(torch, dtype)) for size in sizes]
    mask = torch.rand(batch, seq) < 0.2 if problem["key_padding_mask"] else None

    def rank(comm: Comm) -> tuple[int, int]:
        query, key, value = (shard(x, comm, pattern).requires_grad_() for x in inputs)
        flags = None if mask is None else shard(mask, comm, pattern)
        call: dict[str, Any] = dict(is_causal=problem["is_causal"], key_padding_mask=flags, schedule=schedule)
        out = ring_dilated_attention(query, key, value, pattern, comm, **call)
        forward = comm.sent_bytes
        out.backward(torch.ones_like(out))
        return forward, comm.sent_bytes - forward

    by_rank = run_threads(problem["world_size"], rank)
    return {f"{phase}_bytes": [sent[i] for sent in by_rank] for i, phase in enumerate(PHASES)}


def pattern_in(text: str) -> Pattern:
    """The pattern that the report names."""
    return eval(text, {"Pattern": Pattern})


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=list(CONFIGURATIONS))
def test_bytes_are_those_that_a_run_counts(capsys: pytest.CaptureFixture[str], options: str) -> None:
    report = planned(capsys, options)
    pattern = pattern_in(report["problem"]["pattern"])
    for schedule, facts in report["schedules"].items():
        run = counted(report["problem"], pattern, schedule)
        assert {name: facts["by_rank"][name] for name in run} == run, schedule
        for phase in PHASES:
            sent = run[f"{phase}_bytes"]
            mean = sum(sent) / len(sent)
            balance = max(sent) / mean if mean else 1.0
            assert facts["sent_bytes"][phase] == dict(min=min(sent), mean=mean, max=max(sent), balance=balance)


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=list(CONFIGURATIONS))
def test_work_of_all_ranks_is_that_of_the_pattern(capsys: pytest.CaptureFixture[str], options: str) -> None:
    report = planned(capsys, options)
    p = report["problem"]
    whole = pattern_in(p["pattern"]).flops(
        p["seq"], p["heads"], p["head_dim"], batch=p["batch"], kv_heads=p["kv_heads"], is_causal=p["is_causal"]
    )
    for schedule, facts in report["schedules"].items():
        assert sum(facts["by_rank"]["flops"]) == whole, schedule
        assert facts["flops"]["max"] == max(facts["by_rank"]["flops"])


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=list(CONFIGURATIONS))
def test_exchange_buffers_are_what_tables_hold(capsys: pytest.CaptureFixture[str], options: str) -> None:
    report = planned(capsys, options)
    p = report["problem"]
    pattern = pattern_in(p["pattern"])
    cuts = shard_cuts(p["seq"], p["world_size"], pattern)
    row = p["head_dim"] * getattr(torch, p["dtype"]).itemsize
    for schedule, facts in report["schedules"].items():
        plan = exchange_plan(pattern, cuts, p["heads"], p["kv_heads"], is_causal=p["is_causal"], schedule=schedule)
        for rank, held in enumerate(facts["by_rank"]["exchange_bytes"]):
            received = index_tables(plan, rank, p["batch"]).received
            flags = sum(received["k"].counts) if p["key_padding_mask"] else 0
            assert held == sum(received["qkv"].counts) * row + flags, (schedule, rank)


@pytest.mark.parametrize("seed", range(20))
def test_segments_computed_one_by_one_are_held_too(seed: int) -> None:
    random = np.random.default_rng(seed)
    seq, ranks = int(random.integers(8, 200)), int(random.integers(1, 8))
    lengths = [int(random.integers(1, 250)) for _ in range(2)]
    pattern = Pattern(lengths, [int(random.integers(1, min(length, 9) + 1)) for length in lengths])
    plan = ExchangePlan(pattern, shard_cuts(seq, ranks), 6, 3, is_causal=bool(seed % 2), fuse_branches=False)
    held = exchange_buffer_bytes(plan, Rows(8, "float32", 2))
    assert held.tolist() == [sum(index_tables(plan, rank, 2).received["qkv"].counts) * 8 * 4 for rank in range(ranks)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_buffers_are_four_blocks(is_causal: bool) -> None:
    plan = ExchangePlan(Pattern([10, 70], [2, 3]), shard_cuts(70, 4), 4, 2, is_causal, "ring")
    found = ring_buffer_bytes(plan, Rows(8, "float32", 2, key_padding_mask=True))
    for rank in range(4):
        blocks = [
            sum(max(c.key_rows(i) for i in range(c.size)) for c in ring_segments(plan, branch, rank, 2)) for branch in range(2)
        ]
        assert found[rank] == 4 * max(blocks) * (2 * 8 * 4 + 1)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_sent_is_received(phase: str, schedule: str) -> None:
    for ranks, is_causal in itertools.product(range(1, 12), (False, True)):
        plan = ExchangePlan(Pattern([9, 40, 131], [1, 3, 7]), shard_cuts(131, ranks), 6, 3, is_causal, schedule)
        traffic = plan.traffic(phase, Rows(8, "float32", 2, key_padding_mask=True))
        for leg in (traffic.there, traffic.back, traffic.ring):
            assert leg.sent.sum() == leg.received.sum()
            assert (min(leg.sent.min(), leg.received.min())) >= 0


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert report["choice"].startswith("auto: 4 local, 1 scatter: ")


def test_times_are_those_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--seq 4096 --segments 4096 --rates 1 --heads 4 --dim 8 --dtype fp32 --world-size 4 --schedule gather --rank 1"
    found = planned(capsys, f"{options} --bandwidth 1MB/s --flops 1G")
    seconds, rank = found["schedules"]["gather"]["seconds"], found["rank"]["gather"]
    sending = sum(
        max(found["rank"]["gather"][way][phase]["total"] for way in ("sent_bytes", "received_bytes")) for phase in PHASES
    )
    assert seconds["compute"] == pytest.approx(3.5 * 4 * 8 * 4 * 1024 * 4096 / 1e9)
    assert seconds["communication"] == rank["seconds"]["communication"] == pytest.approx(sending / 1e6)
    assert seconds["sequential"] == pytest.approx(seconds["compute"] + seconds["communication"])
    assert seconds["overlapped"] == pytest.approx(seconds["sequential"])  # nothing is local: all of it waits for rows


def test_local_work_hides_what_travels(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--seq 1M --causal --heads 8 --dim 64 --schedule scatter")["schedules"]["scatter"]["seconds"]
    assert found["compute"] < found["overlapped"] < found["sequential"]


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, CONFIGURATIONS["unaligned"] + " --rank 1")
    cuts = shard_cuts(97, 3, pattern_in(report["problem"]["pattern"]))
    for schedule, rank in report["rank"].items():
        facts = report["schedules"][schedule]
        assert rank["positions"] == list(cuts[1:3])
        for phase in PHASES:
            assert rank["sent_bytes"][phase]["total"] == facts["by_rank"][f"{phase}_bytes"][1]
        assert rank["flops"]["total"] == facts["by_rank"]["flops"][1]


@pytest.mark.parametrize("options", ["", "--seq 1e9 --world-size 1024 --kv-heads 8 --causal --rank 7", *CONFIGURATIONS.values()])
def test_the_report_fits_in_100_columns(capsys: pytest.CaptureFixture[str], options: str) -> None:
    text = output(capsys, "plan", *options.split())
    assert "sent forward, max" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_a_schedule_refuses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, CONFIGURATIONS["keys that count once"])
    assert list(report["schedules"]) == ["auto", "scatter"]
    assert list(report["refused"]) == ["gather", "ring"]
    assert "gather is refused: schedule='gather'" in output(capsys, "plan", *CONFIGURATIONS["keys that count once"].split())


def test_numbers_beyond_64_bits(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--seq 1e9 --segments dense --heads 32 --dim 128 --world-size 2")
    assert report["schedules"]["gather"]["flops"]["max"] == 4 * 128 * 16 * 10**18


def test_plans_explain_themselves() -> None:
    plan = ExchangePlan(Pattern([16, 64, 128], [1, 2, 4]), shard_cuts(128, 4), 8, 8)
    first, second, third = plan.explain(Rows(8, "bfloat16")).splitlines()
    assert first == "branch 0: segments of 16, rate 1: local: every segment is within one rank: nothing is sent"
    assert second.startswith("branch 1: segments of 64, rate 2: scatter over 2 ranks: ")
    assert "scatter 256, gather 256" in second
    sent = [int(plan.traffic(phase, Rows(8, "bfloat16"), 2).sent.max()) for phase in PHASES]
    assert f"sends {sent[0]:,} bytes forward, {sent[1]:,} backward" in third
    assert "scatter moves the fewest rows" in third
    text = ExchangePlan(Pattern([128], [4]), shard_cuts(128, 4), 8, 8, schedule="ring").explain()
    assert "ring over 4 ranks" in text
    assert "as schedule='ring' says" in text


BAD = [
    ("--rank 8", "--rank: 8 is not there; --world-size 8 has ranks 0 to 7"),
    ("--seq 5", "--world-size: 8 ranks cannot share out --seq 5"),
    ("--rates 1,2", "--rates: without --segments"),
    ("--world-size 0", "--world-size: '0' is not a whole number of 1 or more"),
    ("--bandwidth fast", "--bandwidth: 'fast' is not a bandwidth; write"),
    ("--bandwidth 0GB/s", "--bandwidth: '0GB/s' is not a bandwidth"),
    ("--flops -1", "--flops: "),
    ("--schedule none", "--schedule: invalid choice: 'none'"),
    ("--kv-heads 5", "--kv-heads: 5 does not divide --heads 32"),
    ("--overlap once --schedule ring", "schedule='ring' sums up what each branch finds"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[options for options, _ in BAD])
def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    assert main(["plan", *options.split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_numbers_as_people_write_them() -> None:
    sizes = {"1e9": 10**9, "1G": 2**30, "64K": 2**16, "1.5k": 1536, "1,048,576": 2**20, "65_536": 65536, " 7 ": 7}
    assert {text: whole_number(text) for text in sizes} == sizes
    for text in ("1.5", "1,04", "1e-3", "", "x", "-1", "1/2", "1e999"):
        with pytest.raises(ValueError, match="is not a whole number"):
            whole_number(text)
    speeds = {"50GB/s": 5e10, "400Gbit/s": 5e10, "400Gbps": 5e10, "1GiB/s": 2.0**30, "5e10": 5e10, "1.5MB/s": 1.5e6}
    assert {text: bandwidth(text) for text in speeds} == speeds
    rates = {"400T": 4e14, "9.7e12": 9.7e12, "1.2P": 1.2e15, "989 TFLOP/s": 989e12}
    assert {text: flops(text) for text in rates} == rates


def test_a_plan_needs_no_torch(tmp_path: Any) -> None:
    from helpers.command_line import in_subprocess

    (tmp_path / "torch.py").write_text("raise ImportError('torch is not to be imported')")
    done = in_subprocess("-m", "dilkit", "plan", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"] == "plan"


def test_a_run_of_the_first_configuration_is_right() -> None:
    """The counts above are those of a run that computes the right thing."""
    pattern = Pattern([8, 24, 97], [1, 3, 5])
    inputs = [torch.randn(1, 97, 4, 8, dtype=torch.float64) for _ in range(3)]
    parts = run_threads(3, lambda c: ring_dilated_attention(*(shard(x, c, pattern) for x in inputs), pattern, c, schedule="ring"))
    torch.testing.assert_close(torch.cat(parts, 1), dilated_attention(*inputs, pattern))
