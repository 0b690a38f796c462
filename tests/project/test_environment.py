"""The stages of the environment."""

import os
import re
import sys

import pytest
from helpers.project import ROOT, run, succeed

pytestmark = pytest.mark.surroundings

SCRIPTS = ROOT / ".ci" / "environment"
MACHINE = str(SCRIPTS / "machine.py")
TARGETS = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()


@pytest.fixture
def virtual(tmp_path):
    """The interpreter of a virtual environment in an odd place, with something that is called torch."""
    folder = tmp_path / "mein Gerät"
    succeed(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=tmp_path)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.py").touch()
    return folder / "bin" / "python"


def test_every_target_can_be_made():
    for target in TARGETS:
        done = run("make", "--dry-run", target, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, ""), f"make {target}: {done.stderr}"


def test_a_virtual_environment_with_torch_is_used_as_it_is(virtual):
    noted = succeed(str(virtual), MACHINE, "--reused", cwd=ROOT).strip()
    assert re.fullmatch(r"build/reused/\w{12}", noted)
    planned = succeed("make", "--dry-run", "demo", f"PYTHON={virtual}", cwd=ROOT)
    assert f'"{virtual}" .ci/environment/install.py demo' in planned
    assert f'"{virtual}" -m dilkit demo' in planned
    assert ".venv" not in planned
    assert ".venv/bin/python -m dilkit demo" in succeed("make", "--dry-run", "--always-make", "demo", cwd=ROOT), (
        "any other makes one"
    )
    os.utime(virtual.parents[1] / "pyvenv.cfg", (1, 1))
    assert succeed(str(virtual), MACHINE, "--reused", cwd=ROOT).strip() != noted, (
        "an environment that was made anew is another one"
    )
