"""Commands over ranks: which ranks, `dilkit bench --comm`, and the suite `ring`; on threads, and on small jobs of processes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from dilkit import environment
from dilkit.comm import Comm
from dilkit.tools import cli
from dilkit.tools.bench.ranks import faults as ring_faults
from dilkit.tools.bench.ranks import rank as ring_rank
from dilkit.tools.bench.ranks import suite as suite_ring
from dilkit.tools.bench.ranks import targets as suite_ring_targets
from dilkit.tools.bench.ranks.targets import Figure
from dilkit.tools.console import launcher
from dilkit.tools.console import ranks as job
from dilkit.tools.console.launcher import JobError
from dilkit.tools.site import figures

SMALL = ("--seqs", "64,128", "--segments", "32,128", "--rates", "1,4", "--heads", "4", "--dim", "8", "--repeats", "1", "--train")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}


@pytest.fixture(autouse=True)
def started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *OPEN_MPI, *MPICH):
        monkeypatch.delenv(name, raising=False)


def ranks(comm: str | None = None, world_size: int | None = None, timeout: float | None = None) -> Namespace:
    return Namespace(comm=comm, world_size=world_size, timeout=timeout)


class TestJob:
    @pytest.mark.parametrize(
        ("variables", "found"),
        [
            ({}, None),
            (TORCHRUN, environment.Launch("torchrun", 1, 4, 1, 2)),
            (OPEN_MPI, environment.Launch("mpirun", 2, 3, 2, 3)),
            (MPICH, environment.Launch("mpirun", 0, 3, 0, 3)),
            ({"RANK": "1"}, None),
        ],
    )
    def test_launchers_are_known_by_what_they_tell(self, variables, found, monkeypatch) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert environment.launch() == found
        assert environment.first_of_all() == (found is None or found.rank == 0)

    @pytest.mark.parametrize(
        ("args", "variables", "complaint"),
        [
            (ranks(world_size=2), {}, "--world-size: goes with --comm alone"),
            (ranks(timeout=2.0), {}, "--timeout: goes with --comm alone"),
            (ranks(), OPEN_MPI, "mpirun started 3 processes, which would all do the same; add --comm mpi"),
            (ranks(), TORCHRUN, "torchrun started 4 processes, which would all do the same; add --comm torch"),
            (ranks("threads"), {}, "--comm threads: how many?"),
            (ranks("threads", 2), MPICH, "start it without mpirun"),
            (ranks("mpi", 4), OPEN_MPI, "--world-size: 4, but there are 3 ranks; mpirun decides"),
            (ranks("mpi", 2), {}, "--world-size: 2, but there are 1 ranks"),
            (ranks("torch"), {}, "not started by torchrun"),
            (ranks("torch"), MPICH, "not started by torchrun"),
            (ranks("mpi"), TORCHRUN, "started by torchrun; start it by mpirun"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, args, variables, complaint, monkeypatch) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=complaint.replace("?", r"\?")):
            job.run(args, lambda comm: pytest.fail("it ran"))

    @pytest.mark.parametrize(
        ("args", "variables"),
        [(ranks(), {}), (ranks("mpi", 3), OPEN_MPI), (ranks("mpi"), MPICH), (ranks("torch", 4), TORCHRUN), (ranks("mpi", 1), {})],
    )
    def test_what_fits_is_accepted(self, args, variables, monkeypatch) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        job.check(args)

    def test_only_the_first_process_complains(self, monkeypatch, capsys) -> None:
        for rank, lines in (("0", 1), ("1", 0)):
            monkeypatch.setenv("PMI_RANK", rank)
            monkeypatch.setenv("PMI_SIZE", "2")
            assert cli.main(["bench", "--comm", "carrier pigeons"]) == 2
            assert cli.main(["bench", "--comm", "mpi", "--world-size", "5"]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 2 * lines

    def test_threads_give_the_largest_code_and_name_who_raised(self) -> None:
        assert job.run(ranks("threads", 3), lambda comm: comm.rank) == 2

        def work(comm: Comm) -> int:
            if comm.rank == 1:
                raise ZeroDivisionError("mine")
            comm.agree(b"go on")
            return 0

        with pytest.raises(ZeroDivisionError, match="rank 1: mine"):
            job.run(ranks("threads", 3, 5.0), work)

    def test_cores_are_shared_by_ranks_that_are_bound_to_the_same(self) -> None:
        all_ranks = [("a", 0b0011), ("a", 0b0011), ("a", 0b1100), ("b", 0b0011)]
        assert [job._sharing(rank, all_ranks) for rank in all_ranks] == [2, 2, 1, 1]

    def test_an_error_of_a_process_is_shown_once_and_ends_all(self) -> None:
        program = (
            "import sys; from argparse import Namespace; from dilkit.tools.console import ranks\n"
            "def work(comm):\n"
            "    print('said by', comm.rank)\n"
            "    comm.agree(b'begin')\n"
            "    if comm.rank == 1: raise ZeroDivisionError('mine')\n"
            "    comm.agree(b'go on')\n"
            "    return 0\n"
            "sys.exit(ranks.run(Namespace(comm='torch', world_size=None, timeout=20.0), work))"
        )
        ended = launcher.launch("gloo", 2, ["-c", program], limit=60.0)
        assert ended.code == 1, ended.text
        assert "said by 0" in ended.text
        assert "said by 1" not in ended.text
        assert ended.text.count("Traceback") == ended.text.count("[rank 1] ZeroDivisionError: mine") == 1, ended.text
        assert not ended.left_behind


def bench(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--out", str(out), *arguments])


class TestBench:
    def test_schedules_over_threads(self, tmp_path, capsys) -> None:
        assert bench(tmp_path, "--comm", "threads", "--world-size", "3", *SMALL, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result == json.loads((tmp_path / "bench.json").read_text())
        assert result["ranks"]["world_size"] == 3
        for length in result["lengths"]:
            assert list(length["entries"]) == ["auto", "scatter", "gather", "ring"]
            for entry in length["entries"].values():
                assert entry["verdict"] == "measured", entry
                assert all(finding["passed"] for finding in entry["check"])
                assert entry["ranks"]["sent_bytes"] == entry["ranks"]["planned_bytes"]
                assert sum(entry["ranks"]["sent_bytes"]) > 0
                assert entry["peak_bytes"] is None
        page = (tmp_path / "bench.md").read_text()
        assert "over 3 ranks (threads of one process)" in page
        assert "a rank sends" in page
        assert (tmp_path / "bench.png").exists()

    def test_wrong_bytes_are_no_measurement(self, tmp_path, capsys, monkeypatch) -> None:
        from dilkit.tools.bench.ranks.call import RingCall

        monkeypatch.setattr(RingCall, "planned_bytes", lambda call: [1] * call.comm.size)
        assert bench(tmp_path, "--comm", "threads", "--world-size", "2", *SMALL, "--schedules", "ring", "--json") == 1
        (entry,) = json.loads(capsys.readouterr().out)["lengths"][0]["entries"].values()
        assert entry["verdict"] == "wrong"
        assert "the plan says [1, 1]" in entry["reasons"][0]

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--schedules", "ring"], "--schedules: goes with --comm alone"),
            (["--world-size", "3"], "--world-size: goes with --comm alone"),
            (["--comm", "threads", "--world-size", "2", "--schedules", "star"], "--schedules: 'star' is not known"),
            (["--comm", "threads", "--world-size", "2", "--baseline", "dense"], "--baseline: does not go with --comm"),
            (["--comm", "threads", "--world-size", "2", "--suite", "ring"], "--comm: does not go with --suite"),
            (["--comm", "threads", "--world-size", "0"], "--world-size: '0' is not a whole number"),
            (["--comm", "threads", "--timeout", "0"], "--timeout: '0' is not a number of seconds above 0"),
        ],
    )
    def test_malformed_arguments_are_named(self, tmp_path, capsys, arguments, complaint) -> None:
        assert bench(tmp_path, *arguments) == 2
        assert complaint in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_under_mpirun(self, tmp_path) -> None:
        if not launcher.mpi_version():
            pytest.skip("mpirun and mpi4py are not installed, or do not belong together")
        command = ["-m", "dilkit", "bench", "--comm", "mpi", "--schedules", "auto", *SMALL, "--out", str(tmp_path)]
        ended = launcher.launch("mpi", 2, command, limit=120.0)
        assert ended.code == 0, ended.text
        assert ended.text.count("forward + backward, 1 x tokens") == 1, ended.text
        result = json.loads((tmp_path / "bench.json").read_text())
        assert result["ranks"]["comm"] == "mpi"
        assert result["ranks"]["world_size"] == 2


class TestSuite:
    @pytest.fixture
    def found(self, tmp_path, capsys, monkeypatch) -> dict[str, Any]:
        """A quick run where nothing can start processes."""
        monkeypatch.setattr(launcher, "transports", lambda: ())
        monkeypatch.setattr(launcher, "mpi_version", lambda: "")
        code = cli.main(["bench", "--suite", "ring", "--quick", "--budget", "0.001", "--json", "--out", str(tmp_path)])
        result = json.loads(capsys.readouterr().out)
        assert code == suite_ring.wrong(result)
        return result

    def test_quick_on_threads_alone(self, found, tmp_path) -> None:
        verdicts = {figure["name"]: figure["verdict"] for figure in found["figures"]}
        assert verdicts["calls whose bytes are not those of the plan"] == "met"
        assert verdicts["out, lse, dq, dk, dv over ranks: error over what rounding allows"] == "met"
        assert verdicts["work per rank, causal: max over mean"] == "met"
        assert verdicts["faults: seconds to an error beyond the timeout"] == "met"
        assert verdicts["faults whose error does not name rank and step"] == "met"
        assert verdicts["peak memory per rank, p=1 over p=2"] == "not measured"
        assert not found["memory"]
        assert found["quick"] == suite_ring.QUICK
        assert (tmp_path / "suite.png").stat().st_size > 10_000
        page = (tmp_path / "suite.md").read_text()
        assert "no processes, only threads" in page
        assert "QUICK" in page
        self.read_back(found, tmp_path)

    def read_back(self, found, folder) -> None:
        """The pages that are made from the file."""
        results = folder / "results"
        results.mkdir()
        (results / "ring.json").write_text(json.dumps(found))
        assert "## Faults" in figures.suite(results, "ring")
        assert "[ring.md](results/ring.md)" in figures.measurements(results)
        assert "targets met" in figures.summary(results)

    def test_a_task_on_processes(self) -> None:
        problem = suite_ring.SMALL[0] | dict(dtype="bfloat16", requires_grad=True)
        (call,) = ring_rank.run("gloo", 2, "count_bytes", problems=[problem], schedules=["auto"])
        assert call["sent_bytes"] == call["planned_bytes"]

    def test_a_job_that_fails_says_why(self) -> None:
        with pytest.raises(JobError, match=r"(?s)ended with 1:.*unexpected keyword argument 'colour'") as caught:
            ring_rank.run("gloo", 2, "count_bytes", colour="red", limit=60.0)
        assert "Traceback" in str(caught.value)

    def test_a_job_that_does_not_end_is_killed(self) -> None:
        ended = launcher.launch("gloo", 2, ["-c", "import time; print('up', flush=True); time.sleep(100)"], limit=2.0)
        assert ended.code == launcher.LATE
        assert ended.text.count("up") == 2
        assert ended.seconds < 20
        assert not ended.left_behind

    def test_a_process_that_outlives_its_launcher_is_found_and_killed(self) -> None:
        inner = "import time; time.sleep(60)"
        code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
        assert launcher.launch("gloo", 1, ["-c", code], limit=20.0).left_behind == 1


@pytest.mark.parametrize(
    ("values", "lower", "verdict"),
    [
        ({"a": 1.0, "b": 2.0}, True, "short"),
        ({"a": 1.0}, True, "met"),
        ({"a": 1.0, "b": 2.0}, False, "met"),
        ({}, True, "not measured"),
    ],
)
def test_the_worst_value_decides(values, lower, verdict) -> None:
    assert Figure("list", "figure", 1.0, lambda _: values, lower=lower).judge(dict(list=[]))["verdict"] == verdict


def test_a_figure_is_not_met_where_a_measurement_failed() -> None:
    figure = Figure("list", "figure", 1.0, lambda _: {"a": 1.0})
    assert figure.judge(dict(list=[{}]))["verdict"] == "met"
    assert figure.judge(dict(list=[{}, dict(failed="late")]))["verdict"] == "not measured: a measurement failed"


def test_memory_is_compared_at_the_longest_sequence() -> None:
    entries = [
        dict(config="long", seq=seq, ranks=ranks, peak_bytes=[peak])
        for seq, ranks, peak in ((8, 1, 90), (16, 1, 200), (16, 2, 100))
    ]
    result = dict(memory=[*entries, dict(failed="no")])
    assert suite_ring_targets._shrinks("long", 2)(result) == {"16 tokens": 2.0}
    assert suite_ring_targets._shrinks("long", 4)(result) == {}


def test_what_a_job_of_faults_said_is_read() -> None:
    text = (
        "fault suite: fault at 10.0\n"
        "fault suite: rank 0 knows at 11.5: CommTimeout: exchange 4 (arguments of ring_dilated_attention): nothing from rank 1\n"
        "fault suite: rank 2 knows at 12.0: CommTimeout: exchange 4 (arguments of ring_dilated_attention): nothing from rank 1\n"
    )
    read = ring_faults.read("frozen", launcher.Ended(1, text, 3.0, 13.0, 0))
    assert read["seconds"] == 2.0
    assert read["names_rank"]
    assert read["names_step"]
    silent = ring_faults.read(
        "killed", launcher.Ended(137, "fault suite: fault at 10.0\nprocess rank 1 on signal 9", 3.0, 13.0, 0)
    )
    assert silent["seconds"] == 3.0
    assert silent["names_rank"]
    assert not silent["names_step"]
    assert "failed" in ring_faults.read("killed", launcher.Ended(1, "nothing at all", 3.0, 13.0, 0))
