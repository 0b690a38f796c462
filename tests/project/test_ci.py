"""CI: the tests that it chooses for a change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.project import ROOT

FILES = {
    "comm/__init__.py": "if TYPE_CHECKING:\n    from dilkit.comm.ring import attend as attend\n",
    "comm/ring.py": "from dilkit.comm import rows\n",
    "comm/rows.py": "import dilkit.pattern\n",
    "dilkit/pattern.py": "",
    "backends/cuda/__init__.py": "",
    "tests/helpers/rank.py": "import dilkit.comm.ring\n",
    "tests/comm/conftest.py": "",
    "tests/comm/test_lazy.py": "from dilkit.comm import attend\n",
    "tests/comm/test_type.py": "if TYPE_CHECKING:\n    import dilkit.comm.ring\n",
    "tests/core/test_started.py": "run('tests/helpers/rank.py')\n",
    "tests/core/test_pattern.py": "import dilkit.pattern\n",
    "tests/project/test_docs.py": "ROOT / 'docs'\n",
    "tests/backends/cuda/test_built.py": "import dilkit.backends.cuda\n",
    **{f"tests/core/orders/test_{k}.py": "" for k in range(6)},
}


def test_a_change_chooses_the_tests_that_depend_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    monkeypatch.delitem(sys.modules, "reach", raising=False)
    import reach

    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(reach, "ROOT", tmp_path)

    def chosen(*changed: str) -> set[str]:
        return {name.partition("test_")[2] for name in reach.reached(changed)[0]}

    assert chosen("comm/ring.py") == {"lazy.py", "started.py"}
    assert chosen("tests/comm/conftest.py") == {"lazy.py", "type.py"}
    assert chosen("backends/cuda/kernels/tile.cu") == {"built.py"}
    assert chosen("docs/page.md") == {"docs.py"}
    assert chosen("dilkit/pattern.py") == {"lazy.py", "started.py", "pattern.py"}
    monkeypatch.setattr(reach, "PART", 5)
    assert chosen("dilkit/pattern.py") == {"started.py", "pattern.py"}, "these are in its folder"
    assert chosen("docs/page.md", "dilkit/pattern.py") == {"docs.py"}, "the last change comes first"
