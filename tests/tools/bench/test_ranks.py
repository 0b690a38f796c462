"""Commands over ranks."""

from dataclasses import replace
from functools import partial

import pytest
from helpers.result_files import FOLDER

from dilkit import environment
from dilkit.comm import run_threads
from dilkit.comm.launch import processes
from dilkit.comm.launch.ranks import run_ranks
from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools import cli
from dilkit.tools.bench import run as suite_run, suites
from dilkit.tools.bench.suites.ring import REPORT, RingSuite
from dilkit.tools.bench.workloads import rank_faults, rank_jobs
from dilkit.tools.measure.ranks_call import RanksCall
from dilkit.tools.report import registry
from dilkit.tools.results.rows import ResultRow


@pytest.fixture(autouse=True)
def started_alone(monkeypatch):
    for _, *names in environment._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)


def test_only_the_first_process_complains(monkeypatch, capsys):
    monkeypatch.setattr(cli, "GRACE", 0.0)
    for number, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("PMI_RANK", number)
        monkeypatch.setenv("PMI_SIZE", "2")
        assert cli.main(["demo", "--comm", "carrier pigeons"]) == 2
        assert cli.main(["demo", "--comm", "mpi", "--world-size", "5"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 2 * lines


def test_threads_give_the_first_code_that_is_not_0_and_name_who_raised():
    assert run_ranks("threads", lambda comm: -comm.rank, world_size=3) == -1

    def work(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("mine")
        comm.agree(b"go on")
        return 0

    with pytest.raises(ZeroDivisionError, match="rank 1: mine"):
        run_ranks("threads", work, world_size=3, timeout=5.0)


class TestSuite:
    @pytest.mark.slow
    def test_quick_on_threads_alone(self, tmp_path):
        suite = RingSuite(quick=True, processes=())
        result = suite_run.measure(suite, {}, tmp_path, resume=False)
        assert not suite.wrong(result)
        assert REPORT.document(result).tables
        verdicts = {figure.name: figure.verdict for figure in result.figures}
        exact = {target.name for target in suite.TARGETS if target.exact}
        assert {verdicts[name] for name in exact} == {"met"}
        assert verdicts["peak memory per rank, p=1 over p=2"] == "not measured"

    def test_ranks_that_are_wrong_are_not_timed(self, monkeypatch):
        problem, forward = Problem(pattern=Pattern([16, 64], [1, 4]), seq=64, heads=4, head_dim=8), RanksCall.forward
        race = partial(rank_jobs.race, problem=problem, one_rank_threads=1, repeats=1, case={})
        for factor, verdict in ((1.0, "measured"), (1.1, "wrong")):
            monkeypatch.setattr(RanksCall, "forward", lambda call, q, *rows, by=factor: forward(call, q * by, *rows))
            rows = {row.who: row for row in run_threads(2, race)[0]}
            assert (rows["ranks"].verdict, rows["one rank"].verdict) == (verdict, "measured")
            assert len(rows["ranks"].samples) == (verdict == "measured")

    def test_a_job_that_failed_is_no_figure_and_decides_on_the_exit_code(self):
        def job():
            raise processes.JobError("2 ranks of mpi: the job ended with 1")

        right = ResultRow(table="faults", case=dict(transport="torch"), who="rank 1", values=dict(left_behind=0))
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
    def test_a_run_that_was_interrupted_has_figures_and_a_page(self, name):
        result = registry.read(FOLDER / f"{name}.json")
        suite, page = suites.suite(name)(), registry.words(result.kind)
        for count in range(0, len(result.rows), 6):
            some = replace(result, rows=result.rows[:count], figures=())
            assert len(suite.figures(some)) == len(suite.TARGETS)
            assert page.document(some).headline

    def test_what_a_job_of_faults_said_is_read(self):
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
