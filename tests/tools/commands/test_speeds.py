"""`dilkit plan --calibrate` and `--speeds`: speeds in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.command_line import json_output

from dilkit.comm.plan.forecast import Speed
from dilkit.device import probe
from dilkit.tools import cli
from dilkit.tools.commands.plan.speeds import SpeedsResult
from dilkit.tools.results.file import new_result, write_result


def test_measured_speeds_are_taken_from_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speed, file = Speed(bandwidth=2e9, flops=3e12, latency=0.5, backward=4.0), tmp_path / "speeds.json"
    write_result(new_result(SpeedsResult, probe("cpu"), problem="", ranks=2, speed=speed), file)
    report = json_output(capsys, *f"plan --seq 64 --segments 64 --rates 1 --world-size 2 --speeds {file}".split())
    assert {name: report[name] for name in vars(speed)} == vars(speed)
    assert cli.main(["plan", "--speeds", str(file), "--flops", "1T"]) == 2
    assert "--flops: does not go with --speeds" in capsys.readouterr().err


def test_speeds_are_measured_between_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--calibrate", "speeds.json"]) == 2
    assert "--calibrate: links are measured between ranks; start it as mpirun" in capsys.readouterr().err
