"""Writes into wheels what they are made of, where PEP 770 wants it: `*.dist-info/sboms/dilkit.cdx.json`, as CycloneDX.

    python .ci/release/sbom.py dist/*.whl

A wheel has dilkit's own code, and what Cython generated from it; it links the C library alone, and contains no other's.
"""

import base64
import hashlib
import json
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path


def main(wheels: list[str]) -> int:
    for wheel in map(Path, wheels):
        add(wheel)
        print(f"{wheel.name}: SBOM added")
    return 0 if wheels else 2


def add(wheel: Path) -> None:
    """Write `wheel` again, with the SBOM and its line in RECORD."""
    with zipfile.ZipFile(wheel) as old:
        files = {info.filename: (info, old.read(info)) for info in old.infolist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    folder = record.rpartition("/")[0]
    metadata = Parser().parsestr(files[f"{folder}/METADATA"][1].decode())
    name, sbom = f"{folder}/sboms/dilkit.cdx.json", json.dumps(document(metadata["Version"], generator(files)), indent=1).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(sbom).digest()).rstrip(b"=").decode()
    lines = [*files[record][1].decode().splitlines(), f"{name},sha256={digest},{len(sbom)}"]
    files[record] = (files[record][0], ("\n".join(lines) + "\n").encode())
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr(name, sbom)
        for info, content in files.values():
            new.writestr(info, content)


def generator(files: dict) -> str:
    """The version of Cython, which the extensions name."""
    extensions = (content for name, (_, content) in files.items() if name.endswith(".so"))
    (parts,) = {parts for content in extensions for parts in re.findall(rb"_cython_(\d+)_(\d+)_(\d+)", content)}
    return ".".join(part.decode() for part in parts)


def document(release: str, cython: str) -> dict:
    """The SBOM of a release."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("dilkit", release)},
        "components": [component("Cython", cython)],
        "dependencies": [{"ref": f"dilkit@{release}", "dependsOn": [f"Cython@{cython}"]}],
    }


def component(name: str, release: str) -> dict:
    return {
        "type": "library",
        "bom-ref": f"{name}@{release}",
        "name": name,
        "version": release,
        "purl": f"pkg:pypi/{name.lower()}@{release}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
