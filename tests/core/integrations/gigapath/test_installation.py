"""What `install` puts in the place of GigaPath's package, when, and how that is undone; and scripts that run under it."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.forks import in_child
from helpers.slide_encoder import ARCH

from dilkit.integrations.gigapath import SlideEncoder, install
from dilkit.integrations.gigapath import installation as module_under_test
from dilkit.integrations.gigapath.__main__ import main

FLASH = "gigapath.torchscale.component.flash_attention"
OWN = """
def create_model(pretrained, model_arch, in_chans, local_dir="there", **kwargs):
    "GigaPath's own."
    return ["theirs", pretrained, model_arch, in_chans, local_dir, kwargs]
"""
pytestmark = pytest.mark.usefixtures("files", "not_installed")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GigaPath's package is installed, with all that it imports: its encoder, what looks for flash-attn, and another module."""
    component = tmp_path / "gigapath" / "torchscale" / "component"
    component.mkdir(parents=True)
    for package in (component, component.parent, component.parent.parent):
        (package / "__init__.py").touch()
    (tmp_path / "gigapath" / "slide_encoder.py").write_text(OWN)
    (tmp_path / "gigapath" / "pipeline.py").write_text("from .slide_encoder import create_model\n")
    (component / "flash_attention.py").write_text("flash_attn_func = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module_under_test, "NEEDED", ("torch",))
    monkeypatch.delitem(sys.modules, "gigapath")


def slide_encoder() -> Any:
    return importlib.import_module("gigapath.slide_encoder")


def made() -> Any:
    return slide_encoder().create_model("", ARCH, 1536)


def test_a_module_stands_in_where_the_package_is_not_installed() -> None:
    with install():
        package = importlib.import_module("gigapath")
        assert package.slide_encoder is slide_encoder()
        assert "stand-in by dilkit" in repr(slide_encoder())
        assert issubclass(slide_encoder().LongNetViT, SlideEncoder)
        assert importlib.import_module(FLASH).flash_attn_func is None
        create_model = slide_encoder().create_model
        assert isinstance(create_model("", ARCH, 1536), SlideEncoder)
        assert create_model.__name__ == "create_model"
        with pytest.raises(ModuleNotFoundError, match=r"gigapath\.pipeline"):
            importlib.import_module("gigapath.pipeline")
    with pytest.raises(RuntimeError, match=r"create_model is a stand-in .* install\(\) is undone"):
        create_model("", ARCH, 1536)
    with pytest.raises(ImportError):
        slide_encoder()


@pytest.mark.parametrize("loaded", ["before", "later"])
def test_the_function_of_an_installed_package_is_replaced_and_put_back(installed: None, loaded: str) -> None:
    own = slide_encoder().create_model if loaded == "before" else None
    with install():
        create_model = slide_encoder().create_model
        assert isinstance(create_model("", ARCH, 1536), SlideEncoder)
        assert "local_dir='there'" in str(inspect.signature(create_model))
        assert inspect.getsource(slide_encoder()) == OWN
        assert importlib.import_module("gigapath.pipeline").create_model is create_model
    restored = slide_encoder().create_model
    assert restored("w", "a", 3, lr=1) == create_model("w", "a", 3, lr=1) == ["theirs", "w", "a", 3, "there", {"lr": 1}]
    assert create_model("w", "a", 3, "here")[4] == "here"
    assert restored is not create_model
    assert own in (None, restored)


def test_a_package_that_is_loaded_again_is_patched_again(installed: None) -> None:
    with install():
        assert isinstance(importlib.reload(slide_encoder()).create_model("", ARCH, 1536), SlideEncoder)
    assert slide_encoder().create_model("w", "a", 3)[0] == "theirs"


def test_a_module_stands_in_where_the_package_cannot_be_imported(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other modules are those of the package."""
    monkeypatch.setattr(module_under_test, "NEEDED", ("torch", "no_such_package"))
    with install():
        assert "stand-in by dilkit" in repr(slide_encoder())
        assert isinstance(importlib.import_module("gigapath.pipeline").create_model("", ARCH, 1536), SlideEncoder)
    del sys.modules["gigapath.pipeline"]
    assert slide_encoder().create_model("w", "a", 3)[0] == "theirs"


def test_what_was_imported_before_comes_back(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("gigapath")
    monkeypatch.setattr(module_under_test, "NEEDED", ("no_such_package",))
    with install():
        assert sys.modules["gigapath"] is not package
    assert sys.modules["gigapath"] is package


@pytest.mark.parametrize("first_out", [0, 1])
def test_installations_nest_and_the_latest_rules(first_out: int) -> None:
    handles = [install(backend="reference"), install(backend="sdpa")]
    create_model = slide_encoder().create_model
    assert create_model("", ARCH, 1536).attention.backend == "sdpa"
    handles.pop(first_out).uninstall()
    assert create_model("", ARCH, 1536).attention.backend == ("sdpa" if first_out == 0 else "reference")
    handles.pop().uninstall()
    assert "gigapath.slide_encoder" not in sys.modules


def test_another_name_of_a_stand_in_goes_with_it() -> None:
    with install():
        sys.modules["torchscale"] = importlib.import_module("gigapath.torchscale")
    assert "torchscale" not in sys.modules


def test_flash_attn_stands_in_where_it_is_asked_for() -> None:
    with install():
        assert importlib.util.find_spec("flash_attn") is None
    with install(flash_attn="2.5.8") as handle:
        module = importlib.import_module("flash_attn")
        assert module.__version__ == "2.5.8"
        assert "stand-in by dilkit" in repr(module)
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        own = importlib.import_module(FLASH).flash_attn_func
        for function in (module.flash_attn_func, interface.flash_attn_varlen_func, own):
            with pytest.raises(RuntimeError, match=r"stand-in.* computes nothing: flash-attn is not installed \(pip install"):
                function(1, causal=True)
        with install(flash_attn="2.5.8"), install():
            assert importlib.import_module("flash_attn") is module
        with pytest.raises(
            ValueError, match=r"flash_attn='2\.8\.3', but flash_attn='2\.5\.8' is installed; uninstall that first"
        ):
            install(flash_attn="2.8.3")
    assert repr(handle) == "<dilkit for gigapath: backend=None, flash_attn='2.5.8', not installed>"
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")


def test_an_installed_flash_attn_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("__version__ = '2.8.3'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn")
    with install(flash_attn="2.5.8"):
        assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"


def test_modules_that_others_have_made_are_left_alone() -> None:
    """They have no `__spec__`, so that Python refuses to look for them."""
    others = {name: ModuleType(name) for name in ("flash_attn", "gigapath")}
    sys.modules.update(others)
    with install(flash_attn="2.5.8"):
        assert sys.modules["flash_attn"] is others["flash_attn"]
        assert isinstance(made(), SlideEncoder)
    assert sys.modules["gigapath"] is others["gigapath"]


@pytest.mark.parametrize("loaded", ["before", "later"])
def test_the_package_is_given_a_function_where_flash_attn_stands_in(installed: None, loaded: str) -> None:
    if loaded == "before":
        importlib.import_module(FLASH)
    with install(flash_attn="2.5.8"), pytest.raises(RuntimeError, match="computes nothing"):
        importlib.import_module(FLASH).flash_attn_func()
    assert importlib.import_module(FLASH).flash_attn_func is None


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(backend=3), TypeError, "backend=3 is a int"),
        (dict(flash_attn=2.5), TypeError, r"flash_attn=2\.5 must be the text of a version, such as '2\.5\.8', or None"),
        (dict(flash_attn=""), TypeError, "flash_attn='' must be"),
    ],
)
def test_refused_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        install(**options)
    with pytest.raises(ImportError):
        slide_encoder()


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


def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").touch()

    def run() -> None:
        torch.set_num_threads(1)  # a forked child has none of the threads that this process has started
        with pytest.raises(SystemExit) as ended:
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
