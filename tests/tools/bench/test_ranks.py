"""Commands over ranks: which ranks, `dilkit bench --comm`, and the suite `ring`; on threads, and on small jobs of processes."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.result_files import FOLDER

from dilkit.comm import run_threads
from dilkit.comm.launch import processes
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools import cli
from dilkit.tools.bench import run as suite_run
from dilkit.tools.bench import suites
from dilkit.tools.bench.suites.ring import REPORT, RingSuite
from dilkit.tools.bench.workloads import rank_faults, rank_jobs
from dilkit.tools.console import rank_arguments as ranks
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.report import registry
from dilkit.tools.results.rows import Row

TINY = ("--seqs", "64,128", "--segments", "32,128", "--rates", "1,4", "--heads", "4", "--dim", "8", "--repeats", "1", "--train")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}


@pytest.fixture(autouse=True)
def started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *OPEN_MPI, *MPICH):
        monkeypatch.delenv(name, raising=False)


def asked(comm: str | None = None, world_size: int | None = None, timeout: float | None = None) -> Namespace:
    return Namespace(comm=comm, world_size=world_size, timeout=timeout)


@pytest.mark.parametrize(
    ("args", "variables", "complaint"),
    [
        (asked(world_size=2), {}, "--world-size: goes with --comm alone"),
        (asked(timeout=2.0), {}, "--timeout: goes with --comm alone"),
        (asked(), OPEN_MPI, "mpirun started 3 processes, which would all do the same; add --comm mpi"),
        (asked(), TORCHRUN, "torchrun started 4 processes, which would all do the same; add --comm torch"),
        (asked("threads"), {}, r"--comm threads: how many\?"),
        (asked("threads", 2), MPICH, "start it without mpirun"),
        (asked("mpi", 4), OPEN_MPI, "--world-size: 4, but there are 3 ranks; mpirun decides"),
        (asked("mpi", 2), {}, "--world-size: 2, but there are 1 ranks"),
        (asked("torch"), {}, "not started by torchrun"),
        (asked("torch"), MPICH, "not started by torchrun"),
        (asked("mpi"), TORCHRUN, "started by torchrun; start it by mpirun"),
        (asked(), {}, ""),
        (asked("mpi", 3), OPEN_MPI, ""),
        (asked("mpi"), MPICH, ""),
        (asked("torch", 4), TORCHRUN, ""),
        (asked("mpi", 1), {}, ""),
    ],
)
def test_what_does_not_fit_together_is_refused(args, variables, complaint, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not complaint:
        ranks.check(args)
        return
    with pytest.raises(ValueError, match=complaint):
        ranks.run(args, lambda comm: pytest.fail("it ran"))


def test_only_the_first_process_complains(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "GRACE", 0.0)
    for number, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("PMI_RANK", number)
        monkeypatch.setenv("PMI_SIZE", "2")
        assert cli.main(["bench", "--comm", "carrier pigeons"]) == 2
        assert cli.main(["bench", "--comm", "mpi", "--world-size", "5"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 2 * lines


def test_threads_give_the_first_code_that_is_not_0_and_name_who_raised() -> None:
    assert ranks.run(asked("threads", 3), lambda comm: -comm.rank) == -1

    def work(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("mine")
        comm.agree(b"go on")
        return 0

    with pytest.raises(ZeroDivisionError, match="rank 1: mine"):
        ranks.run(asked("threads", 3, 5.0), work)


def bench(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--out", str(out), *arguments])


@pytest.mark.usefixtures("tiny_yardsticks", "without_pictures")
class TestBench:
    def test_schedules_over_threads(self, tmp_path, capsys) -> None:
        assert bench(tmp_path, "--comm", "threads", "--world-size", "3", *TINY, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result == json.loads((tmp_path / "bench.json").read_text())
        assert result["facts"]["world_size"] == 3
        lengths = len({row["case"]["length"] for row in result["rows"]})
        schedules = [row for row in result["rows"] if row["who"] != "matmul"]
        assert [row["who"] for row in schedules] == ["auto", "scatter", "gather", "ring"] * lengths
        for row in schedules:
            assert row["verdict"] == "measured", row
            assert all(check["passed"] for check in row["checks"])
            assert row["values"]["sent_bytes"] == row["values"]["planned_bytes"]
            assert sum(row["values"]["sent_bytes"]) > 0
            assert "peak_bytes" not in row["values"]
        assert "over 3 ranks (threads)" in (tmp_path / "bench.md").read_text()

    def test_wrong_bytes_are_no_measurement(self, tmp_path, capsys, monkeypatch) -> None:
        monkeypatch.setattr(RanksCall, "planned_bytes", lambda call: (1,) * call.comm.size)
        assert bench(tmp_path, "--comm", "threads", "--world-size", "2", *TINY, "--schedules", "ring", "--json") == 1
        row, *_ = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["who"] == "ring"]
        assert row["verdict"] == "wrong"
        assert "the plan says [1, 1]" in row["reasons"][0]


class TestSuite:
    @pytest.mark.slow
    def test_quick_on_threads_alone(self, tmp_path) -> None:
        suite = RingSuite(quick=True, budget=0.001, processes=())
        result = suite_run.measure(suite, {}, tmp_path, resume=False)
        assert not suite.wrong(result)
        assert REPORT.document(result).tables
        verdicts = {figure.name: figure.verdict for figure in result.figures}
        exact = {target.name for target in suite.TARGETS if target.exact}
        assert {verdicts[name] for name in exact} == {"met"}
        assert verdicts["faults: seconds to an error beyond the timeout"] == "met"
        assert verdicts["faults whose error does not name rank and step"] == "met"
        assert verdicts["peak memory per rank, p=1 over p=2"] == "not measured"

    def test_ranks_that_are_wrong_are_not_timed(self, monkeypatch) -> None:
        problem, forward = Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, heads=4, head_dim=8), RanksCall.forward
        race = partial(rank_jobs.race, problem=problem, one_rank_threads=1, repeats=1, case={})
        for factor, verdict in ((1.0, "measured"), (1.1, "wrong")):
            monkeypatch.setattr(RanksCall, "forward", lambda call, q, *rows, by=factor: forward(call, q * by, *rows))
            rows = {row.who: row for row in run_threads(2, race)[0]}
            assert (rows["ranks"].verdict, rows["one rank"].verdict) == (verdict, "measured")
            assert len(rows["ranks"].samples) == (verdict == "measured")

    def test_a_job_that_failed_is_no_figure_and_decides_on_the_exit_code(self) -> None:
        def job():
            raise processes.JobError("2 ranks of mpi: the job ended with 1")

        right = Row(table="faults", case=dict(transport="torch"), who="rank 1", values=dict(left_behind=0))
        result = registry.read(FOLDER / "ring.json")
        (target,) = (target for target in RingSuite.TARGETS if target.name == "processes left behind")
        for rows, verdict in (
            ((right,), "met"),
            ((right, *rank_jobs.job_step("faults", "killed", job).measure()), "not measured"),
        ):
            some = replace(result, rows=rows, figures=())
            assert target.judge(some).verdict == verdict
            assert RingSuite(processes=()).wrong(some) == (verdict != "met")

    @pytest.mark.parametrize("name", ["ring", "hosts"])
    def test_a_run_that_was_interrupted_has_figures_and_a_page(self, name) -> None:
        result = registry.read(FOLDER / f"{name}.json")
        suite, page = suites.suite(name)(), registry.words(result.kind)
        for count in range(0, len(result.rows), 6):
            some = replace(result, rows=result.rows[:count], figures=())
            assert len(suite.figures(some)) == len(suite.TARGETS)
            assert page.document(some).headline

    def test_what_a_job_of_faults_said_is_read(self) -> None:
        words = "CommTimeout: exchange 4 (arguments of ring_dilated_attention): nothing from rank 1"
        knows = "".join(f"fault suite: rank {one} knows at {at}: {words}\n" for one, at in ((0, 11.5), (2, 12.0)))
        ended = processes.Ended(1, f"fault suite: fault at 10.0\n{knows}", 3.0, 13.0, 0)
        read = rank_faults.fault_row("frozen", "mpi", 2.0, ended)
        known = dict(seconds=2.0, error=words, left_behind=0, names_rank=True, names_step=True)
        assert (read.case, read.values) == (dict(kind="frozen", transport="mpi"), dict(timeout=2.0, **known))
        text = "fault suite: fault at 10.0\nprocess rank 1 on signal 9"
        silent = rank_faults.fault_row("killed", "mpi", 2.0, processes.Ended(137, text, 3.0, 13.0, 0)).values
        assert (silent["seconds"], silent["names_rank"], silent["names_step"]) == (3.0, True, False)
        with pytest.raises(processes.JobError, match="the fault did not come about: nothing at all"):
            rank_faults.fault_row("killed", "mpi", 2.0, processes.Ended(1, "nothing at all", 3.0, 13.0, 0))
