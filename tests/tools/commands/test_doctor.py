"""`dilkit doctor`."""

import os

import pytest
from helpers.command_line import json_output, output
from helpers.fakes import Doubles, registered
from helpers.project import ROOT

from dilkit import registry
from dilkit.comm.launch import processes
from dilkit.environment import CUDA_CACHE, TUNED, VARIABLES
from dilkit.registry import Broken
from dilkit.selection import tuned
from dilkit.tools.commands import doctor


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield
    tuned.read_again()


@pytest.fixture
def without_ranks(monkeypatch):
    monkeypatch.setattr(doctor, "ranks", lambda: iter(()))


def test_nothing_is_wrong_here(capsys, without_ranks):
    report = json_output(capsys, "doctor")
    assert report["right"]
    states = {part: {f["name"]: f["state"] for f in found} for part, found in report["parts"].items() if part != "ranks"}
    assert all(states.values())
    assert [states["backends"][name] for name in ("native", "sdpa", "reference")] == ["works"] * 3
    assert set(states["compiled modules"].values()) == {"works"}
    sources = {path.stem for top in ("dilkit", "backends", "comm") for path in (ROOT / top).rglob("*.pyx")}
    assert {name.rpartition(".")[2] for name in doctor.extension_names()} == sources


def broken_backend(monkeypatch, folder):
    broken = Broken("theirs", "their_package:Theirs", "ImportError: no libtheirs.so")
    monkeypatch.setattr(registry, "_declared", registry.backends() | dict(theirs=broken))


def variable(name, value):
    return lambda monkeypatch, folder: monkeypatch.setenv(name, value)


def no_folder_of_kernels(monkeypatch, folder):
    (folder / "file").write_text("no folder")
    monkeypatch.setenv(CUDA_CACHE.name, str(folder / "file" / "cuda"))


def shared_folder_of_kernels(monkeypatch, folder):
    if os.name != "posix":
        pytest.skip("modes are those of POSIX")
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o777)
    monkeypatch.setenv(CUDA_CACHE.name, str(folder / "shared"))


def damaged_orders(monkeypatch, folder):
    (folder / "tuned.json").write_text('{"schema": 1, "entries": [{}]}')
    monkeypatch.setenv(TUNED.name, str(folder / "tuned.json"))


MALFORMED = "way out: correct it, or unset it: "
WRONG = [
    (broken_backend, "theirs", ("their_package:Theirs: ImportError: no libtheirs.so; way out: reinstall or remove the package",)),
    (variable("DILKIT_BACKEND", "abacus"), "DILKIT_BACKEND", ("Error: DILKIT_BACKEND='abacus'", MALFORMED)),
    (variable("DILKIT_CACHE_BYTES", "lots"), "DILKIT_CACHE_BYTES", ("Error: DILKIT_CACHE_BYTES='lots'", MALFORMED)),
    (variable("DILKIT_CPU_ISA", "mmx"), "DILKIT_CPU_ISA", ("Error: DILKIT_CPU_ISA='mmx'", MALFORMED)),
    (
        no_folder_of_kernels,
        "compiled kernels",
        ("cannot be written (NotADirectoryError", "way out: set DILKIT_CUDA_CACHE to a folder that only you can write"),
    ),
    (
        shared_folder_of_kernels,
        "compiled kernels",
        ("can be written by others (mode 777), so no kernel is read", "way out: run chmod go-w on it, or set DILKIT_CUDA_CACHE"),
    ),
    (
        damaged_orders,
        "measured orders",
        ("tuned.json is ignored: entry 0: ", "way out: measure anew with `dilkit tune`, or remove the file"),
    ),
]


@pytest.mark.parametrize(("breaks", "name", "said"), WRONG, ids=[f"{name} {at}" for at, (_, name, _) in enumerate(WRONG)])
def test_what_is_wrong_is_said_with_a_way_out(breaks, name, said, capsys, monkeypatch, tmp_path, without_ranks):
    breaks(monkeypatch, tmp_path)
    text = output(capsys, "doctor", code=1)
    assert max(map(len, text.splitlines())) <= 100
    _, _, after = " ".join(text.split()).partition(f" {name} WRONG ")
    assert all(words in after for words in said), text


def test_a_foreign_backend_that_computes_wrong_numbers(capsys, without_ranks):
    with registered(Doubles(name="doubles")):
        text = " ".join(output(capsys, "doctor", code=1).split())
    assert "doubles WRONG out: the error is" in text
    assert "way out: do without it: DILKIT_BACKEND=native,sdpa," in text


@pytest.mark.slow
def test_ranks_meet_here():
    found = [(finding.name, finding.state) for finding in doctor.ranks()]
    assert {("threads", "works"), ("torch", "works")} <= {*found}
    assert (("mpi", "works") in found) == bool(processes.mpi_version())
