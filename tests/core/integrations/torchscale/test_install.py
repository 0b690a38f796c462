"""Patches of `install`: of what, when, and undone."""

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType

import pytest
import torch
from helpers.torchscale_peer import PUBLISHED

from dilkit.integrations.torchscale import install, proving
from dilkit.integrations.torchscale.proving import layer
from dilkit.selection import proof

SOURCE = """
from helpers import torchscale_peer

class DilatedAttention(torchscale_peer.DilatedAttention):
    def forward(self, *args, **kwargs):
        "torchscale's own."
        return super().forward(*args, **kwargs)
"""
FORKS = ("torchscale", "xtuner.model.torchscale", "my_torchscale")


@pytest.fixture(autouse=True)
def nothing_left():
    before = [*sys.meta_path]
    yield
    assert sys.meta_path == before


@pytest.fixture(params=FORKS)
def fork(request, tmp_path, monkeypatch):
    folder = tmp_path.joinpath(*request.param.split("."), "component")
    folder.mkdir(parents=True)
    (folder / "dilated_attention.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield f"{request.param}.component.dilated_attention"
    for name in [name for name in sys.modules if name.partition(".")[0] == request.param.partition(".")[0]]:
        del sys.modules[name]


def is_patched(kind):
    return hasattr(kind.forward, "__wrapped__")


def test_loaded_classes_are_patched_and_restored(peer):
    own = vars(peer)["forward"]
    handle = install()
    assert is_patched(peer)
    assert inspect.signature(peer.forward) == inspect.signature(own)
    handle.uninstall()
    assert vars(peer)["forward"] is own
    handle.uninstall()
    assert vars(peer)["forward"] is own


def test_a_module_that_is_loaded_later_is_patched(fork):
    with install():
        module = importlib.import_module(fork)
        assert is_patched(kind := module.DilatedAttention)
        assert kind.forward.__doc__ == "torchscale's own."
        assert inspect.getsource(module) == SOURCE
        assert module.__loader__ is module.__spec__.loader
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert is_patched(importlib.reload(module).DilatedAttention)
    assert not is_patched(kind)
    assert not is_patched(importlib.reload(module).DilatedAttention)
    with install():
        assert is_patched(module.DilatedAttention)


def test_a_module_that_is_looked_for_only(fork):
    with install():
        spec = importlib.util.find_spec(fork)
        assert spec.loader.get_source(fork) == SOURCE
        assert importlib.util.find_spec(fork.replace("dilated", "other")) is None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not is_patched(module.DilatedAttention), "it was uninstalled before"


def test_segment_lengths_that_numpy_2_writes_are_evaluated(tmp_path, monkeypatch):
    folder = tmp_path / "my_torchscale" / "architecture"
    folder.mkdir(parents=True)
    (folder / "config.py").write_text("def lengths(text):\n    return eval(text)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with install():
            config = importlib.import_module("my_torchscale.architecture.config")
            assert config.lengths("[np.int64(1024), 2048]") == [1024, 2048]
        with pytest.raises(NameError):
            config.lengths("[np.int64(1024)]")
        with install():
            assert config.lengths("[np.int64(1024)]") == [1024]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_torchscale"]:
            del sys.modules[name]


@pytest.mark.parametrize("fork", ["torchscale"], indirect=True)
def test_a_later_version_is_compared_at_its_first_call(fork, monkeypatch, tmp_path, capsys):
    asked = []

    def outcome(command):
        asked.append(command[-1])
        proving.main(command[-1])
        return capsys.readouterr().out.strip()

    def call(version):
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)
        with install():
            made(x, x, x)

    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setattr(proof, "_proofs", {})
    monkeypatch.setattr(proof, "outcome", outcome)
    kind, x = importlib.import_module(fork).DilatedAttention, torch.randn(1, 13, 32, dtype=torch.float64)
    made = layer(kind, [8, 16], [1, 2])
    for version in ("0.3.0", "0.4.0", "0.4.0"):
        call(version)
    assert asked == [f"{fork}:DilatedAttention"]
    kind.branch = lambda self, q, k, v, *sizes: super(kind, self).branch(q, k, 2 * v, *sizes)
    with pytest.raises(ValueError, match=r"of torchscale 0\.5\.0 computes .* a forward pass is off by"):
        call("0.5.0")


def test_a_module_that_fails_to_load_is_not_in_the_way(fork, tmp_path):
    (file,) = tmp_path.rglob("dilated_attention.py")
    file.write_text("raise RuntimeError('broken')")
    with install(), pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(fork)


@pytest.mark.parametrize(
    "name", ["torchscale.component.other", "torchscale.dilated_attention", "other.component.dilated_attention"]
)
def test_other_modules_are_left_alone(name, peer, monkeypatch):
    module = ModuleType(name)
    module.DilatedAttention = type("DilatedAttention", (peer,), {"forward": lambda self, x: x})
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delattr(sys.modules[PUBLISHED], "DilatedAttention")
    with install():
        assert not is_patched(module.DilatedAttention)
        assert not is_patched(peer)


@pytest.mark.parametrize("first_out", [0, 1])
def test_installations_nest_and_the_latest_rules(peer, first_out):
    own, names = vars(peer)["forward"], ["first", "second"]
    made, x = layer(peer, [8, 16], [1, 4]), torch.randn(1, 13, 32, dtype=torch.float64)
    handles = [install(backend=name) for name in names]
    with pytest.raises(ValueError, match="'second'"):
        made(x, x, x)
    handles.pop(first_out).uninstall()
    with pytest.raises(ValueError, match=f"'{names[1 - first_out]}'"):
        made(x, x, x)
    handles.pop().uninstall()
    assert vars(peer)["forward"] is own


def test_a_later_patch_of_others_stays(peer):
    made, x = layer(peer, [8], [1]), torch.randn(1, 16, 32, dtype=torch.float64)
    own = made(x, x, x)[0]
    with install(backend="reference"):
        ours = peer.forward
        peer.forward = lambda self, *args: ours(self, *args)
    assert peer.forward is not ours
    assert torch.equal(made(x, x, x)[0], own)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(tail="none"), ValueError, "tail='none' is not known; choose from 'exact', 'zeros'"),
        (dict(mask=None), ValueError, "mask=None is not known; choose from 'apply', 'ignore'"),
        (dict(backend=3), TypeError, "backend=3 is a int"),
        (dict(backend=[]), ValueError, r"backend=\[\] must be"),
    ],
)
def test_refused_arguments(peer, options, error, text):
    with pytest.raises(error, match=text):
        install(**options)
    assert not is_patched(peer)
