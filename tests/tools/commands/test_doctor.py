"""`dilkit doctor` on an installation that is whole, and on one with broken pieces."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import in_subprocess, json_output, output
from helpers.fakes import registered
from helpers.project import ROOT

from dilkit import Device
from dilkit.backends.reference import Reference
from dilkit.comm.launch import processes
from dilkit.environment import BACKEND, CACHE_BYTES, CPU_ISA, CUDA_CACHE, TUNED, VARIABLES
from dilkit.registry import Broken
from dilkit.selection import tuned
from dilkit.tools.commands.doctor import backends as computing
from dilkit.tools.commands.doctor.installation import extension_names


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No variables of dilkit, an empty folder for files, and nothing kept of what was read from it."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield
    tuned.read_again()


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take seconds."""
    monkeypatch.setattr(computing, "ranks", lambda: iter(()))


def test_nothing_is_wrong_here(capsys: pytest.CaptureFixture[str], without_ranks: None) -> None:
    report = json_output(capsys, "doctor")
    assert report["right"]
    states = {part: {f["name"]: f["state"] for f in found} for part, found in report["parts"].items() if part != "ranks"}
    assert all(states.values())
    assert [states["backends"][name] for name in ("native", "sdpa", "reference")] == ["works"] * 3
    assert set(states["compiled modules"].values()) == {"works"}


@pytest.mark.slow
def test_ranks_meet_here() -> None:
    found = [(finding.name, finding.state) for finding in computing.ranks()]
    assert {("threads", "works"), ("torch", "works")} <= {*found}
    assert (("mpi", "works") in found) == bool(processes.mpi_version())


def test_every_extension_is_looked_at() -> None:
    sources = {path.stem for top in ("dilkit", "backends", "comm") for path in (ROOT / top).rglob("*.pyx")}
    assert {name.rpartition(".")[2] for name in extension_names()} == sources


def wrong_line(capsys: pytest.CaptureFixture[str], name: str) -> str:
    """What the command, which must exit with 1, prints of the one thing that is wrong."""
    text = output(capsys, "doctor", code=1)
    assert max(map(len, text.splitlines())) <= 100
    assert "1 WRONG" in text.splitlines()[-1]
    _, _, after = " ".join(text.split()).partition(f" {name} WRONG ")
    return after


def test_a_foreign_backend_that_computes_wrong_numbers(capsys: pytest.CaptureFixture[str], without_ranks: None) -> None:
    class Doubles(Reference):
        name = "doubles"

        def forward(self, *inputs: Any) -> Any:
            out, lse = super().forward(*inputs)
            return out * 2, lse

    with registered(Doubles(name="doubles")):
        line = wrong_line(capsys, "doubles")
    assert line.startswith("out: the error is")
    assert "way out: do without it: DILKIT_BACKEND=native,sdpa," in line


def test_a_backend_that_cannot_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_ranks: None
) -> None:
    from dilkit import registry

    loaded = registry.backends()
    broken = Broken("theirs", "their_package:Theirs", "ImportError: no libtheirs.so")
    monkeypatch.setattr(registry, "_declared", {**loaded, "theirs": broken})
    line = wrong_line(capsys, "theirs")
    assert line.startswith("their_package:Theirs: ImportError: no libtheirs.so way out: reinstall or remove the package")


BAD_VALUES = {BACKEND: "abacus", CACHE_BYTES: "lots", CPU_ISA: "mmx"}


@pytest.mark.parametrize("variable", BAD_VALUES, ids=lambda variable: variable.name)
def test_a_malformed_variable(
    variable: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_ranks: None
) -> None:
    monkeypatch.setenv(variable.name, BAD_VALUES[variable])
    text = " ".join(output(capsys, "doctor", code=1).split())
    assert re.search(rf"{variable.name} WRONG \w+Error: {variable.name}='{BAD_VALUES[variable]}'", text)
    assert "way out: correct it, or unset it: " in text


def test_a_variable_that_dilkit_does_not_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_ranks: None
) -> None:
    monkeypatch.setenv("DILKIT_BACKENDS", "native")
    with pytest.warns(UserWarning, match=r"DILKIT_BACKENDS is set.*did you mean DILKIT_BACKEND\?"):
        assert "did you mean DILKIT_BACKEND?" in output(capsys, "doctor")


def test_a_folder_of_kernels_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_ranks: None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CUDA_CACHE.name, str(tmp_path / "file" / "cuda"))
    line = wrong_line(capsys, "compiled kernels")
    assert "cannot be written (NotADirectoryError" in line
    assert "way out: set DILKIT_CUDA_CACHE to a folder that only you can write" in line


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_folder_of_kernels_that_others_may_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_ranks: None, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv(CUDA_CACHE.name, str(tmp_path / "shared"))
    line = wrong_line(capsys, "compiled kernels")
    assert "can be written by others (mode 777), so no kernel is read from there" in line
    assert "way out: run chmod go-w on it, or set DILKIT_CUDA_CACHE" in line


def test_a_damaged_file_of_orders(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_ranks: None, tmp_path: Path
) -> None:
    (tmp_path / "tuned.json").write_text('{"schema": 1, "entries": [{}]}')
    monkeypatch.setenv(TUNED.name, str(tmp_path / "tuned.json"))
    line = wrong_line(capsys, "measured orders")
    assert "tuned.json is ignored: entry 0: " in line
    assert "way out: measure anew with `dilkit tune`, or remove it with `dilkit tune --clear`" in line


def test_a_broken_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    done = in_subprocess("-m", "dilkit", "doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert not done.stderr
    said = " ".join(done.stdout.split())
    assert "torch WRONG ImportError: libtorch_cpu.so" in said
    assert "way out: pip install --force-reinstall torch" in said
    assert "backends this part WRONG ImportError: libtorch_cpu.so" in said


def launcher(folder: Path, name: str, script: str) -> Path:
    """A program that stands in for `mpirun`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="the launchers are scripts for a POSIX shell")
def test_launchers_of_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = launcher(tmp_path, "good", "echo '2 Their MPI 1'; echo '2 Their MPI 1'")
    alone = launcher(tmp_path, "alone", "echo '1 Their MPI 1'; echo '1 Their MPI 1'")
    hangs = launcher(tmp_path, "hangs", 'test "$1" = --version || sleep 60')
    monkeypatch.setattr(computing, "LIMIT", 1.0)
    assert [(f.state, f.way_out) for f in computing._over_mpi([good, alone])] == [("works", ""), ("absent", f"use {good}")]
    (one,) = computing._over_mpi([alone])
    assert (one.state, "force-reinstall" in one.way_out) == ("WRONG", True)
    (one,) = computing._over_mpi([hangs])
    assert one.state == "WRONG"
    assert "took more than 1 s" in one.found


def test_launchers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "mpi_launchers", lambda: [])
    monkeypatch.setattr(computing, "missing_modules", lambda *_: ())
    monkeypatch.setattr(computing, "_two_ranks", lambda *_: computing.works("ranks", "2 ranks add up"))
    assert [(f.state, f.found) for f in computing.ranks()][-1] == ("absent", "there is no mpirun")


def test_the_compiler_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="CuPy loads the compiler")
    monkeypatch.setattr(computing, "torch_note", lambda device: None)
    assert computing.compiler(Device.assume("sm_80")).state == "works"
    refused = computing.compiler(Device("cuda", "one of the future", (99, 0)))
    assert refused.state == "WRONG"
    assert "no kernel" in refused.found
    assert refused.way_out
