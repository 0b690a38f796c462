"""GigaPath's `create_model` and what `install` puts in place of its package: arguments, callers, and how that is undone."""

import importlib
import inspect
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.forks import in_child
from helpers.slide_encoder import ARCH, FLASH_ARCH, NARROW, tiles_and_coords

from dilkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from dilkit.integrations.gigapath import (
    ARCHITECTURES,
    SlideEncoder,
    create_model,
    install,
    installation as module_under_test,
    load_slide_encoder,
)
from dilkit.integrations.gigapath.__main__ import main

pytestmark = pytest.mark.usefixtures("files", "not_installed")
PACKAGES = ("gigapath", "flash_attn", "torchscale")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write random weights by architecture; a substitute for huggingface_hub returns them by repository."""
    files = {}
    for seed, (arch, config) in enumerate(NARROW.items()):
        torch.manual_seed(seed)
        model = SlideEncoder(config)
        for weight in model.parameters():
            weight.data += 0.3 * torch.randn_like(weight)
        files[arch] = tmp_path / arch / "slide_encoder.pth"
        files[arch].parent.mkdir()
        torch.save({"model": model.state_dict()}, files[arch])
        monkeypatch.setitem(ARCHITECTURES, arch, config)
    module, (usual, flash) = ModuleType("huggingface_hub"), files.values()
    module.hf_hub_download = lambda name, filename, local_dir: str(flash if name.endswith("-flash") else usual)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return files


@pytest.fixture
def not_installed():
    """Neither package is installed, and what a test imports or installs is gone after it."""
    finders = [*sys.meta_path]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            patch.delitem(sys.modules, name)
        for name in PACKAGES:
            patch.setitem(sys.modules, name, None)
        yield
        assert sys.meta_path == finders
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (dict(), dict(segment_lengths=(1024, 5792, 32768, 185363, 1048576), global_pool=False, ngrids=1000, dropout=0.25)),
        (dict(slide_ngrids=500, dropout=0.5, drop_path_rate=0.0), dict(ngrids=500, dropout=0.5, drop_path=0.0)),
        (dict(max_wsi_size=250000), dict(segment_lengths=(1024, 4870, 23170, 110217, 524288), tile_size=256)),
        (dict(tile_size=512), dict(segment_lengths=(1024, 4096, 16384, 65536, 262144), tile_size=512)),
        (dict(global_pool=None, tile_size=None, max_wsi_size=None), dict(global_pool=False, tile_size=256)),
        (dict(segment_length=[64, 128], dilated_ratio=(1, 2)), dict(segment_lengths=(64, 128), dilation_rates=(1, 2))),
        (
            dict(segment_length="[64, 128]", dilated_ratio="[1, 2]", tile_size=512),
            dict(segment_lengths=(64, 128), dilation_rates=(1, 2), tile_size=512),
        ),
    ],
)
def test_settings(settings, fields):
    config = create_model("", ARCH, 1536, **settings).config
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (dict(lr=0.1, embed_dim=3), TypeError, "create_model takes no lr, embed_dim; beside the architecture it takes slide_ngr"),
        (dict(slide_ngrids=0), ValueError, "slide_ngrids=0 must be at least 1"),
        (dict(drop_path_rate=1.0), ValueError, r"drop_path_rate=1\.0 must be at least 0 and less than 1"),
        (dict(dropout="much"), TypeError, "dropout='much' is a str"),
        (dict(global_pool=1), TypeError, "global_pool=1 is a int"),
        (dict(max_wsi_size=8191), ValueError, "max_wsi_size=8191 must be at least 8192"),
        (dict(tile_size=0), ValueError, "tile_size=0 must be at least 1"),
        (dict(segment_length=[64], max_wsi_size=250000), ValueError, "segment_length and max_wsi_size both say"),
        (dict(segment_length="64, many"), TypeError, "segment_length='64, many' must be numbers such as"),
        (dict(dilated_ratio=2), TypeError, "dilated_ratio=2 must be numbers"),
        (dict(dilated_ratio=[1, 0, 4, 8, 16]), ValueError, r"dilated_ratio\[1\]=0 must be at least 1"),
        (dict(dilated_ratio=[1, 0.5, 4, 8, 16]), TypeError, r"dilated_ratio\[1\]=0\.5 is a float"),
        (dict(model_arch="vit"), ValueError, "model_arch='vit' is not known; choose from 'gigapath_slide_enc12l768d'"),
        (dict(in_chans=0), ValueError, "in_chans=0 must be at least 1"),
        (dict(pretrained=None), TypeError, "pretrained=None is a NoneType; a path, 'hf_hub:NAME' or '' is needed"),
        (
            dict(pretrained=Path("none.pth")),
            FileNotFoundError,
            r"'none\.pth' does not exist; give the file of the weights, or 'hf_hub:",
        ),
        (
            dict(pretrained=FLASH_ARCH),
            ValueError,
            r"model_arch='gigapath_slide_enc12l768d': .* \(32, 384\) in it and \(48, 1536\).*_enc12l384d' with in_chans=384$",
        ),
        (
            dict(pretrained=FLASH_ARCH, model_arch=FLASH_ARCH),
            ValueError,
            r"\(32, 384\) in it and \(32, 1536\).* model_arch='gigapath_slide_enc12l384d' with in_chans=3",
        ),
    ],
)
def test_arguments_of_create_model_that_are_refused(files, settings, error, text):
    given = dict(pretrained="", model_arch=ARCH, in_chans=1536) | settings
    with pytest.raises(error, match=text):
        create_model(**given | dict(pretrained=files.get(given["pretrained"], given["pretrained"])))


def test_what_a_checkpoint_stores_holds(files, tmp_path):
    content = torch.load(files[ARCH])
    torch.save({**content, "global_pool": True, "segment_lengths": (4, 8, 16, 32, 64)}, tmp_path / "stored.pth")
    config = create_model(tmp_path / "stored.pth", ARCH, 1536, tile_size=512).config
    assert (config.global_pool, config.segment_lengths) == (True, (4, 8, 16, 32, 64))
    for given in (dict(global_pool=False), dict(max_wsi_size=250000)):
        with pytest.raises(ValueError, match=r"contradicts checkpoint .*stored\.pth"):
            create_model(tmp_path / "stored.pth", ARCH, 1536, **given)


def test_training_mode_is_warned_of_where_nothing_is_trained():
    tiles, coords = tiles_and_coords(1536)
    model = create_model("", ARCH, 1536)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"dropout changes the embeddings.*\.eval\(\)") as caught:
        model(tiles, coords)
    assert [one.filename for one in caught] == [__file__]
    model(tiles, coords)  # warnings are errors
    with torch.no_grad():
        create_model("", ARCH, 1536, dropout=0.0, drop_path_rate=0.0)(tiles, coords)
        model.eval()(tiles, coords)


def test_half_coordinates_that_are_no_pixels_are_refused():
    model = create_model("", ARCH, 1536, slide_ngrids=300).eval()
    tiles, coords = tiles_and_coords(1536)
    with pytest.warns(UserWarning, match="are lost"), pytest.raises(ValueError, match="outside the grid of 300 x 300"):
        model(tiles, (coords + 65536).half())
    with pytest.raises(TypeError, match=r"coords is torch\.bfloat16, which does not hold every pixel"):
        model(tiles, coords.bfloat16())


def test_it_is_a_slide_encoder_with_their_call_and_grid():
    model = create_model("", ARCH, 1536).eval()
    tiles, coords = tiles_and_coords(1536)
    assert isinstance(model, SlideEncoder)
    assert len(model(x=tiles, coords=coords, all_layer_embed=True)) == len(model(tiles, coords, True)) == 13
    assert model.slide_ngrids == 1000
    with pytest.raises(AttributeError):
        model.slide_ngrids = 500


UNTRAINED = "the class token is pooled, which GigaPath's pretraining did not train"
HUB = "hf_hub:prov-gigapath/prov-gigapath"


class Caller(NamedTuple):
    """A package's calls of `create_model` and of the encoder. `name`: its weights, or "" for a file."""

    settings: dict[str, Any]
    name: str = HUB
    arch: str = ARCH
    tile_size: int = 256
    dtype: torch.dtype = torch.float32
    layers: bool = False
    warnings: tuple[str, ...] = ()


CALLERS = {
    "TRIDENT": Caller(dict(global_pool=True), tile_size=512, layers=True),
    "STAMP": Caller(dict(global_pool=True), dtype=torch.float16, warnings=("coords are torch.float16",)),
    "slide2vec": Caller({}, tile_size=512),
    "LazySlide": Caller(dict(local_dir="there"), f"{HUB}-flash", FLASH_ARCH),
    "raw2features": Caller(dict(global_pool=True), "", FLASH_ARCH, tile_size=512, layers=True),
    "slideflow": Caller(dict(global_pool=False), layers=True),
}


def texts(call):
    """Return the result of `call` and the texts of its warnings, which must point to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert all(one.filename == __file__ for one in caught)
    return result, [str(one.message) for one in caught]


@pytest.mark.parametrize("name", CALLERS)
def test_each_package_gets_its_embeddings(files, name):
    caller, settings = CALLERS[name], CALLERS[name].settings
    pool, channels = settings.get("global_pool", False), NARROW[caller.arch].in_chans
    with install():
        weights = caller.name or str(files[caller.arch])
        model, warned = texts(lambda: slide_encoder().create_model(weights, caller.arch, channels, **settings))
    assert [text[: len(UNTRAINED)] for text in warned] == [UNTRAINED] * (not pool)
    assert model.training
    model.to("cpu").eval().to(caller.dtype)
    model.tile_size = np.int64(caller.tile_size)
    tiles, coords = tiles_and_coords(channels, step=caller.tile_size)
    where = dict(global_pool=pool, tile_size=caller.tile_size, dtype=caller.dtype)
    with torch.inference_mode(), torch.autocast("cpu", enabled=caller.dtype == torch.float32):
        given = coords.half() if caller.dtype == torch.float16 else coords
        embeddings, warned = texts(lambda: model(tiles.to(caller.dtype), given, all_layer_embed=caller.layers))
        ours = load_slide_encoder(files[caller.arch], caller.arch, **where)
        expected = ours(tiles.to(caller.dtype), coords, all_layer_embed=caller.layers)
    assert len(embeddings) == (13 if caller.layers else 1)
    assert all(torch.equal(one, other) for one, other in zip(embeddings, expected, strict=True))
    assert [text[:24] for text in warned] == [*caller.warnings]


FLASH = "gigapath.torchscale.component.flash_attention"
OWN = """
def create_model(pretrained, model_arch, in_chans, local_dir="there", **kwargs):
    "GigaPath's own."
    return ["theirs", pretrained, model_arch, in_chans, local_dir, kwargs]
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install GigaPath's package: its encoder, the module that looks for flash-attn, and another one."""
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


def slide_encoder():
    return importlib.import_module("gigapath.slide_encoder")


def test_a_module_stands_in_where_the_package_is_not_installed():
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
        sys.modules["torchscale"] = importlib.import_module("gigapath.torchscale")
    assert "torchscale" not in sys.modules, "another name of a stand-in"
    with pytest.raises(RuntimeError, match=r"create_model is a stand-in .* install\(\) is undone"):
        create_model("", ARCH, 1536)
    with pytest.raises(ImportError):
        slide_encoder()


@pytest.mark.parametrize("loaded", ["before", "later"])
def test_the_function_of_an_installed_package_is_replaced_and_put_back(installed, loaded):
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
    with install():
        assert isinstance(importlib.reload(slide_encoder()).create_model("", ARCH, 1536), SlideEncoder)
    assert slide_encoder().create_model("w", "a", 3)[0] == "theirs"


def test_a_module_stands_in_where_the_package_cannot_be_imported(installed, monkeypatch):
    monkeypatch.setattr(module_under_test, "NEEDED", ("torch", "no_such_package"))
    package = importlib.import_module("gigapath")
    with install():
        assert sys.modules["gigapath"] is not package
        assert "stand-in by dilkit" in repr(slide_encoder())
        assert isinstance(importlib.import_module("gigapath.pipeline").create_model("", ARCH, 1536), SlideEncoder)
    assert sys.modules["gigapath"] is package
    del sys.modules["gigapath.pipeline"]
    assert slide_encoder().create_model("w", "a", 3)[0] == "theirs"


@pytest.mark.parametrize("first_out", [0, 1])
def test_installations_nest_and_the_latest_rules(first_out):
    handles = [install(backend="reference"), install(backend="sdpa")]
    create_model = slide_encoder().create_model
    assert create_model("", ARCH, 1536).attention.backend == "sdpa"
    handles.pop(first_out).uninstall()
    assert create_model("", ARCH, 1536).attention.backend == ("sdpa" if first_out == 0 else "reference")
    handles.pop().uninstall()
    assert "gigapath.slide_encoder" not in sys.modules


def test_flash_attn_stands_in_where_it_is_asked_for():
    with install():
        assert importlib.util.find_spec("flash_attn") is None
    with install(flash_attn="2.5.8") as handle:
        module = importlib.import_module("flash_attn")
        assert module.__version__ == "2.5.8"
        assert "stand-in by dilkit" in repr(module)
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        assert (module.flash_attn_func, interface.flash_attn_varlen_func) == (flash_attn_func, flash_attn_varlen_func)
        with pytest.raises(RuntimeError, match=r"stand-in.* computes nothing: flash-attn is not installed \(pip install"):
            importlib.import_module(FLASH).flash_attn_func(1, causal=True)
        with install(flash_attn="2.5.8"), install():
            assert importlib.import_module("flash_attn") is module
        words = r"flash_attn='2\.8\.3', but flash_attn='2\.5\.8' is installed; uninstall that first"
        with pytest.raises(ValueError, match=words):
            install(flash_attn="2.8.3")
    assert repr(handle) == "<dilkit for gigapath: backend=None, flash_attn='2.5.8', not installed>"
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")


def test_an_installed_flash_attn_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("__version__ = '2.8.3'")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn")
    with install(flash_attn="2.5.8"):
        assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"


def test_modules_that_others_have_made_are_left_alone():
    """They have no `__spec__`, so that Python refuses to look for them."""
    others = {name: ModuleType(name) for name in ("flash_attn", "gigapath")}
    sys.modules.update(others)
    with install(flash_attn="2.5.8"):
        assert sys.modules["flash_attn"] is others["flash_attn"]
        assert isinstance(slide_encoder().create_model("", ARCH, 1536), SlideEncoder)
    assert sys.modules["gigapath"] is others["gigapath"]


@pytest.mark.parametrize("loaded", ["before", "later"])
def test_the_package_is_given_a_function_where_flash_attn_stands_in(installed, loaded):
    if loaded == "before":
        importlib.import_module(FLASH)
    with install(flash_attn="2.5.8"), pytest.raises(RuntimeError, match="computes nothing"):
        importlib.import_module(FLASH).flash_attn_func()
    assert importlib.import_module(FLASH).flash_attn_func is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(backend=3), "backend=3 is a int"),
        (dict(flash_attn=2.5), r"flash_attn=2\.5 must be the text of a version, such as '2\.5\.8', or None"),
        (dict(flash_attn=""), "flash_attn='' must be"),
    ],
)
def test_arguments_of_install_that_are_refused(options, text):
    with pytest.raises(TypeError, match=text):
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


def test_a_script_is_run_as_python_runs_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "beside.py").touch()

    def run():
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


def test_a_script_that_is_not_there_is_refused(capsys, tmp_path):
    before = [*sys.argv]
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "none.py")])
    assert ended.value.code == 2
    assert "none.py is not there" in capsys.readouterr().err
    assert sys.argv == before
