"""The stages of the environment: what each installs, which torch is chosen, and when an environment that is there is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.project import ROOT, metadata, run, succeed

pytestmark = pytest.mark.surroundings

SCRIPTS = ROOT / ".ci" / "environment"
MACHINE = str(SCRIPTS / "machine.py")
TARGETS = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
CUDA = ["numpy", "nvidia-cublas==13.1; platform_system == 'Linux'"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def virtual(tmp_path: Path) -> Path:
    """The interpreter of a virtual environment in an odd place, with something that is called torch."""
    folder = tmp_path / "mein Gerät"
    succeed(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=tmp_path)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.py").touch()
    return folder / "bin" / "python"


def test_every_target_can_be_made() -> None:
    for target in TARGETS:
        done = run("make", "--dry-run", target, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, ""), f"make {target}: {done.stderr}"


def test_a_virtual_environment_with_torch_is_used_as_it_is(virtual: Path) -> None:
    noted = succeed(str(virtual), MACHINE, "--reused", cwd=ROOT).strip()
    assert re.fullmatch(r"build/reused/\w{12}", noted)
    planned = succeed("make", "--dry-run", "demo", f"PYTHON={virtual}", cwd=ROOT)
    assert f'"{virtual}" .ci/environment/install.py demo' in planned
    assert f'"{virtual}" -m dilkit demo' in planned
    assert ".venv" not in planned
    os.utime(virtual.parents[1] / "pyvenv.cfg", (1, 1))
    assert succeed(str(virtual), MACHINE, "--reused", cwd=ROOT).strip() != noted, (
        "an environment that was made anew is another one"
    )


def test_any_other_interpreter_makes_an_environment(virtual: Path) -> None:
    (torch,) = virtual.parents[1].glob("lib/python*/site-packages/torch.py")
    torch.unlink()
    assert succeed(str(virtual), MACHINE, "--reused", cwd=ROOT).strip() == ""
    planned = succeed("make", "--dry-run", "--always-make", "demo", f"PYTHON={virtual}", cwd=ROOT)
    assert f'"{virtual}" -m venv .venv' in planned
    assert ".venv/bin/python -m dilkit demo" in planned


@pytest.mark.usefixtures("scripts")
@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils:UserWarning")  # pip imports it, under Python 3.10
def test_stages_take_what_pyproject_says() -> None:
    import install

    project = metadata()["project"]
    demo = install.requirements("demo")
    assert {*project["dependencies"], *project["optional-dependencies"]["plot"], *metadata()["build-system"]["requires"]} == {
        *demo
    }
    assert install.requirements("test") == project["optional-dependencies"]["test"]
    assert not [name for name in demo if re.match("cupy|nvidia|mypy|mkdocs|mpi4py|pytest", name)]


class Commands:
    """Stands in for `subprocess`: pip's report says what its torch needs, and uv ends as it is told."""

    def __init__(self, needs: list[str], uv: int) -> None:
        self.needs, self.uv, self.seen = needs, uv, []

    def run(self, command: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
        self.seen.append(Path(command[0]).name)
        report = json.dumps({"install": [{"metadata": {"requires_dist": self.needs}}]})
        return subprocess.CompletedProcess(command, self.uv if command[0] == "uv" else 0, report, "")


@pytest.fixture
def prefer(scripts: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Which programs are started to choose a torch."""
    import torch_build

    def started(needs: list[str], uv: int = 0, gpu: bool = False) -> list[str]:
        commands = Commands(needs, uv)
        monkeypatch.setattr(torch_build, "subprocess", commands)
        monkeypatch.setattr(torch_build, "has_gpu", lambda: gpu)
        monkeypatch.setattr(torch_build.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(torch_build.shutil, "which", lambda name: name)
        monkeypatch.setattr(torch_build.sys, "platform", "linux")
        torch_build.prefer_cpu("torch>=2.6", ("--constraint", "constraints.txt"))
        return commands.seen

    return started


def test_torch_for_cpus_is_preferred_where_there_is_no_gpu(prefer: Callable[..., list[str]], capsys: Any) -> None:
    python = Path(sys.executable).name
    assert prefer(CUDA) == [python, "uv"]
    assert prefer(["numpy", "cuda-python; extra == 'x'"]) == [python], "pip's build is one for CPUs"
    assert prefer(CUDA, gpu=True) == []
    assert capsys.readouterr().out == ""
    assert prefer(CUDA, uv=2) == [python, "uv"]
    assert "not to be had" in capsys.readouterr().out


@pytest.mark.slow
def test_in_ci_a_test_that_lacks_a_package_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\npytest.importorskip('no_such', reason='no_such is not installed')")
    options = ("-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    done = run(sys.executable, "-m", "pytest", "--nothing-missing", *options, cwd=tmp_path, python_path=ROOT / "tests")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "skipped, with --nothing-missing: " in done.stdout
