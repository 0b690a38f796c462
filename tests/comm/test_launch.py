"""Jobs of several processes."""

import pytest
from helpers.launch import fork

from dilkit import environment
from dilkit.comm.launch import processes, ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}


@pytest.fixture(autouse=True)
def started_alone(monkeypatch):
    for name in (*TORCHRUN, *OPEN_MPI, *MPICH):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (TORCHRUN, environment.Launch("torchrun", 3, 4, 1, 2)),
        (OPEN_MPI, environment.Launch("mpirun", 2, 3, 2, 3)),
        (MPICH, environment.Launch("mpirun", 0, 3, 0, 3)),
        ({"RANK": "1"}, None),
    ],
)
def test_launchers_are_known_by_their_variables(variables, found, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.launch() == found
    assert environment.first_of_all() == (found is None or found.rank == 0)


def test_cores_are_shared_by_ranks_that_are_bound_to_the_same():
    all_ranks = [("a", 0b0011), ("a", 0b0011), ("a", 0b1100), ("b", 0b0011)]
    assert [ranks._sharing(one, all_ranks) for one in all_ranks] == [2, 2, 1, 1]


def test_an_error_of_a_process_is_shown_once_and_ends_all(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; from dilkit.comm.launch.ranks import run_ranks\n"
        "def work(comm):\n"
        "    print('said by', comm.rank)\n"
        "    comm.agree(b'begin')\n"
        "    if comm.rank == 1: raise ZeroDivisionError('mine')\n"
        "    comm.agree(b'go on')\n"
        "    return 0\n"
        "if __name__ == '__main__': sys.exit(run_ranks('torch', work, timeout=20.0))"
    )
    ended = fork([str(program)], processes.torch_variables(2)).finish(60.0)
    assert ended.code == 1, ended.text
    assert "said by 0" in ended.text
    assert "said by 1" not in ended.text
    assert ended.text.count("Traceback") == ended.text.count("[rank 1] ZeroDivisionError: mine") == 1, ended.text
    assert not ended.left_behind


def test_a_job_that_does_not_end_is_killed():
    ended = processes.launch("torch", 2, ["-c", "import time; print('up', flush=True); time.sleep(100)"], limit=2.0)
    assert ended.code == processes.LATE
    assert ended.text.count("up") == 2
    assert ended.seconds < 20
    assert not ended.left_behind


def test_a_process_that_outlives_its_launcher_is_found_and_killed():
    inner = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    assert processes.launch("torch", 1, ["-c", code], limit=20.0).left_behind == 1
