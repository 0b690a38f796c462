"""What docs/gigapath.md says to those who have no weights: its program and its commands, one after the other."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.project import ROOT, succeed

PAGE = (ROOT / "docs" / "gigapath.md").read_text()


@pytest.mark.slow
def test_a_slide_is_embedded_without_the_weights(tmp_path: Path) -> None:
    name, program, commands = re.findall(
        r'^```python title="([^"]+)"\n(.*?)^```\n\n```console\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL
    )[0]
    (tmp_path / name).write_text(program)
    for line in commands.splitlines():
        first, *arguments = shlex.split(line.removeprefix("$ "))
        command = [sys.executable] if first == "python" else [sys.executable, "-m", first]
        shown = succeed(*command, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "torch.Size([768])" in shown
    (tmp_path / "random.pth").unlink()
