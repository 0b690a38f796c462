"""What a release is made with: its version in every place, and the SBOM of a wheel."""

import base64
import hashlib
import json
import re
import sys
import zipfile

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


def test_changes_go_on_top_of_the_changelog():
    assert re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == "Unreleased"


def test_every_oldest_python_is_built():
    """The first Python that is supported, and the first with the stable ABI."""
    assert metadata()["tool"]["cibuildwheel"]["build"].split() == ["cp310-*", "cp311-*"]
    assert metadata()["project"]["requires-python"] == ">=3.10"


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
