"""Whole models of torchscale and GigaPath, from checkouts of theirs: they run without flash-attn, and as they do with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit.integrations.torchscale import install

pytestmark = pytest.mark.filterwarnings("ignore")  # of fairscale
Model = tuple[Callable[[], Tensor], torch.nn.Module]


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for what the models use of other packages to be made and trained, not to compute."""
    pytest.importorskip("fairscale", reason="fairscale, which torchscale imports, is not installed, nor with dilkit[peers]")
    before, path = {*sys.modules}, [*sys.path]
    for name in ("timm", "timm.models", "timm.models.layers", "timm.models.registry", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["timm.models.layers"].drop_path = None
    sys.modules["timm.models.registry"].register_model = lambda function: function
    yield
    sys.path[:] = path
    for name in [name for name in {*sys.modules} - before if "torchscale" in name or name.startswith("gigapath")]:
        del sys.modules[name]


def encoder(monkeypatch: pytest.MonkeyPatch) -> Model:
    """torchscale's LongNet, which makes a mask that is all False."""
    kind: Any = importlib.import_module("torchscale.model.LongNet").LongNetEncoder
    config: Any = importlib.import_module("torchscale.architecture.config").EncoderConfig
    sizes = dict(encoder_embed_dim=32, encoder_attention_heads=4, encoder_ffn_embed_dim=64, encoder_layers=2, vocab_size=-1)
    made = kind(config(**sizes, flash_attention=True, segment_length="[8, 16]", dilated_ratio="[1, 2]"))
    x = torch.randn(2, 43, 32, dtype=torch.float64)
    return lambda: made(src_tokens=None, token_embeddings=x)["encoder_out"], made


def slide_encoder(monkeypatch: pytest.MonkeyPatch) -> Model:
    """GigaPath's, of a small configuration that it comes with."""
    module: Any = importlib.import_module("gigapath.slide_encoder")
    with install():  # numpy 2 writes np.int64(1024) into the configuration
        made = module.LongNetViT(in_chans=16, embed_dim=384, depth=3, slide_ngrids=16, dropout=0.0, drop_path_rate=0.0)
    tiles, coords = torch.randn(1, 1500, 16, dtype=torch.float64), torch.randint(0, 16, (1, 1500, 2)) * 256
    return lambda: made(tiles, coords)[0], made


MODELS = [pytest.param("torchscale", encoder, id="encoder"), pytest.param("gigapath", slide_encoder, id="slide encoder")]


@pytest.mark.parametrize(("peer", "make"), MODELS, indirect=["peer"])
def test_a_model_runs_without_flash_attn(
    peer: type[Any], make: Callable[[pytest.MonkeyPatch], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = sys.modules[peer.__module__.partition(".")[0]]
    monkeypatch.syspath_prepend(str(Path(package.__path__[0]).parent))
    run, made = make(monkeypatch)
    made.double().eval()
    flash = sys.modules[f"{peer.__module__.rpartition('.')[0]}.multihead_attention"].flash_attn_func
    theirs = [module for name, module in sys.modules.items() if name.endswith("torchscale.component.multihead_attention")]
    for module in theirs:
        monkeypatch.setattr(module, "flash_attn_func", flash)
    own = run()
    for module in theirs:
        monkeypatch.setattr(module, "flash_attn_func", None)
    with pytest.raises(AssertionError):
        run()
    with install():
        torch.testing.assert_close(run(), own, rtol=0, atol=1e-12)
