"""Versions and the SBOM."""

import base64
import hashlib
import json
import re
import runpy
import sys
import zipfile
from types import SimpleNamespace

import pytest
from helpers.project import ROOT, metadata, succeed

import dilkit

INFO = "dilkit-1.2.dist-info"


def test_every_file_has_the_same_version():
    """The citation, and the newest release of the changelog."""
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.search(r"^## \[(\d.*)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited
    assert released
    assert cited[1] == released[1] == dilkit.__version__
    assert re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == "Unreleased"
    assert metadata()["tool"]["cibuildwheel"]["build"].split() == ["cp310-*", "cp311-*"], (
        "the first, and the first with the stable ABI"
    )
    assert metadata()["project"]["requires-python"] == ">=3.10"


@pytest.mark.parametrize(
    ("version", "changes", "complaint"),
    [
        ("1.2.0", "- New.\n", ""),
        ("1.1.9", "- New.\n", "1.1.9 is not newer than 1.2.0"),
        ("1.10.0", "", "nothing is under Unreleased"),
        ("1.10.0", "- New.\n", ""),
    ],
)
def test_a_version_is_cut_in_every_place(version, changes, complaint, tmp_path, monkeypatch, capsys):
    before = "1.2.0" if version != "1.2.0" else "1.1.0"
    texts = {
        "CHANGELOG.md": f"## [Unreleased]\n\n{changes}\n## [{before}] - 2026-01-01\n\n- Old.\n",
        "CITATION.cff": f'version: {before}\ndate-released: "2026-01-01"\n',
        "dilkit/__init__.py": f'__version__ = "{before}"\n',
    }
    (tmp_path / "dilkit").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    script = runpy.run_path(str(ROOT / ".ci/release/cut.py"))["cut"]
    run = []
    monkeypatch.setitem(script.__globals__, "ROOT", tmp_path)
    monkeypatch.setattr("subprocess.run", lambda command, **_: run.append(command) or SimpleNamespace(stdout=""))
    assert script(version, "2026-02-03") == bool(complaint)
    assert complaint in capsys.readouterr().err
    if complaint:
        assert {name: (tmp_path / name).read_text() for name in texts} == texts
        return
    assert (tmp_path / "CHANGELOG.md").read_text().startswith(f"## [Unreleased]\n\n## [{version}] - 2026-02-03\n\n- New.\n\n## [")
    assert (tmp_path / "CITATION.cff").read_text() == f'version: {version}\ndate-released: "2026-02-03"\n'
    assert (tmp_path / "dilkit/__init__.py").read_text() == f'__version__ = "{version}"\n'
    assert [command[2:] for command in run[1:]] == [["dilkit.tools.site.pages"]]


def test_the_sbom_of_a_wheel_names_what_is_in_it(tmp_path):
    wheel = tmp_path / "dilkit-1.2-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("dilkit/_cache.abi3.so", b"\0_cython_3_3_1limited11\0")
        archive.writestr(f"{INFO}/METADATA", "Name: dilkit\nVersion: 1.2\n")
        archive.writestr(f"{INFO}/RECORD", f"dilkit/_cache.abi3.so,,\n{INFO}/RECORD,,\n")
    succeed(sys.executable, str(ROOT / ".ci/release/sbom.py"), str(wheel), cwd=tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{INFO}/sboms/dilkit.cdx.json")
        record = archive.read(f"{INFO}/RECORD").decode()
        assert len(archive.namelist()) == 4
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
    assert f"{INFO}/sboms/dilkit.cdx.json,sha256={digest},{len(text)}" in record.splitlines()
    sbom = json.loads(text)
    assert sbom["metadata"]["component"]["version"] == "1.2"
    assert [(part["name"], part["version"]) for part in sbom["components"]] == [("Cython", "3.3.1")]
