"""The `dilkit` command in this process, or in a fresh Python."""

import json
import os
import subprocess
import sys
from typing import Any

from dilkit.tools.cli import main


def output(capsys, *argv: str, code: int = 0) -> str:
    found = main(argv)
    printed = capsys.readouterr()
    assert found == code, printed.err
    return printed.out


def json_output(capsys, *argv: str, code: int = 0) -> dict[str, Any]:
    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    report = json.loads(output(capsys, *argv, "--json", code=code), parse_constant=reject)
    assert report["schema"] == 1
    assert report["command"] == argv[0]
    return report


def in_subprocess(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env={**os.environ, **environment}, check=False)
