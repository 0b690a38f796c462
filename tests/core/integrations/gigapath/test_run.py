"""`python -m dilkit.integrations.gigapath run`: a script as Python runs it, after `install()`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.forks import in_child
from helpers.gigapath_package import ARCH, checkpoints, without

from dilkit.integrations.gigapath.__main__ import main

SCRIPT = """
import json, sys
from pathlib import Path
import beside, flash_attn
from gigapath.slide_encoder import create_model

model = create_model("", sys.argv[2], 1536)
model = create_model("", sys.argv[2], 1536)
facts = dict(name=__name__, file=__file__, argv=sys.argv, flash_attn=flash_attn.__version__)
facts |= dict(model=type(model).__name__, backend=model.attention.backend)
Path(__file__).with_suffix(".json").write_text(json.dumps(facts))
sys.exit(3)
"""


def test_a_script_is_run_as_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").touch()
    checkpoints(tmp_path, monkeypatch)

    def run() -> None:
        torch.set_num_threads(1)  # a forked child has none of the threads that this process has started
        with without("gigapath", "flash_attn"), pytest.raises(SystemExit) as ended:
            main(["run", "--flash-attn", "2.5.8", "--backend", "reference", str(script), "--x", ARCH, "--help"])
        assert ended.value.code == 3

    assert in_child(run) == "done"
    assert json.loads((tmp_path / "script.json").read_text()) == dict(
        name="__main__",
        file=str(script),
        argv=[str(script), "--x", ARCH, "--help"],
        flash_attn="2.5.8",
        model="LongNetViT",
        backend="reference",
    )


def test_a_script_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = [*sys.argv]
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "none.py")])
    assert ended.value.code == 2
    assert "none.py is not there" in capsys.readouterr().err
    assert sys.argv == before
