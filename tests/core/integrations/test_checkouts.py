"""Models of torchscale and GigaPath, and flash-attn's tests, from checkouts: DILKIT_TORCHSCALE, _GIGAPATH and _FLASH_ATTN."""

import builtins
import importlib
import math
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.slide_encoder import embeddings, places
from helpers.torchscale_peer import loaded, unavailable

from dilkit.integrations import flash_attn, gigapath, torchscale

pytestmark = pytest.mark.filterwarnings("ignore")  # of fairscale
SIZES = dict(embed_dim=64, depth=2, in_chans=24)
LENGTHS = (16, 32, 64, 128, 256)
STAND_INS = "timm", "timm.models", "timm.models.layers", "timm.models.registry", "huggingface_hub"


@pytest.fixture
def peer(request, monkeypatch):
    """The checkout of this name can be imported from; afterwards nothing of it is loaded."""
    if why := unavailable(request.param):
        pytest.skip(why)
    pytest.importorskip("fairscale", reason="fairscale, which torchscale imports, is not installed, nor with dilkit[peers]")
    before, path = {*sys.modules}, [*sys.path]
    for name in STAND_INS:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["timm.models.layers"].drop_path = lambda x, rate, training: x  # in eval mode
    sys.modules["timm.models.registry"].register_model = lambda function: function
    with loaded(request.param) as kind:
        package = sys.modules[kind.__module__.partition(".")[0]]
        monkeypatch.syspath_prepend(str(Path(package.__path__[0]).parent))
        yield
    sys.path[:] = path
    for name in [name for name in {*sys.modules} - before if "torchscale" in name or name.startswith("gigapath")]:
        del sys.modules[name]


def with_flash(function):
    for name, module in [*sys.modules.items()]:
        if name.endswith("torchscale.component.multihead_attention"):
            module.flash_attn_func = function


@pytest.mark.parametrize("peer", ["torchscale"], indirect=True)
def test_longnet_runs_without_flash_attn(peer):
    kind = importlib.import_module("torchscale.model.LongNet").LongNetEncoder
    config = importlib.import_module("torchscale.architecture.config").EncoderConfig
    sizes = dict(encoder_embed_dim=32, encoder_attention_heads=4, encoder_ffn_embed_dim=64, encoder_layers=2, vocab_size=-1)
    made = kind(config(**sizes, flash_attention=True, segment_length="[8, 16]", dilated_ratio="[1, 2]")).double().eval()
    inputs = dict(src_tokens=None, token_embeddings=torch.randn(2, 43, 32, dtype=torch.float64))
    own = made(**inputs)["encoder_out"]
    with_flash(None)
    with pytest.raises(AssertionError):
        made(**inputs)
    with torchscale.install():
        torch.testing.assert_close(made(**inputs)["encoder_out"], own, rtol=0, atol=1e-12)


def plain_softmax(q, k, v, dropout=0.0, bias=None, scale=None, is_causal=False):
    """Return what flash-attn computes: the result, and the logarithm of the softmax's denominator."""
    scores = torch.einsum("blhd,bmhd->bhlm", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v), scores.logsumexp(-1)


def their_encoder(lengths, global_pool):
    code = importlib.import_module("gigapath.slide_encoder")
    known = sys.modules["torchscale.model.LongNetConfig"]
    known.LongNet_2_layers_64_dim = dict(known.LongNet_12_layers_256_dim, encoder_layers=2, encoder_embed_dim=64)
    known.LongNet_2_layers_64_dim["encoder_ffn_embed_dim"] = 256
    with torchscale.install():  # numpy 2 writes np.int64(1024) into the configuration
        norm = lambda dim: torch.nn.LayerNorm(dim, eps=1e-6)  # noqa: E731  as its architectures have it
        model = code.LongNetViT(**SIZES, slide_ngrids=20, global_pool=global_pool, norm_layer=norm).double().eval()
    model.encoder.args.segment_length = list(lengths)
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    with_flash(plain_softmax)
    return model


@pytest.mark.parametrize("peer", ["gigapath"], indirect=True)
@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (16, 32, 48, 64, 80)])
@pytest.mark.parametrize("n", [1, 7, 15, 31, 40, 41, 62, 63, 130])
def test_every_layer_is_gigapaths(peer, n, lengths, global_pool):
    model = their_encoder(lengths, global_pool)
    config = gigapath.SlideEncoderConfig(**SIZES, ngrids=20, segment_lengths=lengths, global_pool=global_pool)
    ours = gigapath.SlideEncoder(config, dtype=torch.float64).eval()
    assert ours.state_dict().keys() == model.state_dict().keys()
    ours.load_state_dict(model.state_dict())
    slide = torch.randn(1, n, 24, dtype=torch.float64), places(n)
    with torch.no_grad():
        found = [*ours(*slide, all_layer_embed=True), *ours(*slide)]
        procedure = embeddings(model.state_dict(), config, *(x[0] for x in slide))
        with mock.patch.object(torch.Tensor, "float", lambda x: x):  # it rounds its activations to single precision
            right = [*model(*slide, all_layer_embed=True), *model(*slide)]
    for one, same, other in zip(found, procedure, right, strict=True):
        assert (one - other).abs().max() <= 1e-12
        assert (same - other[0]).abs().max() <= 1e-12


GRID, MOST_PAIRS = 614, 2**15
"""Calls of flash-attn's tests, and the queries times keys of most: of its grid of half a million."""
NEWER = "varlen_paged_kv_num_splits", "kvcache_paged_block_table_bounds", "generator_arg_must_be_none"
"""Tests after 2.8, of functions that are private and of the class of an error."""


@pytest.fixture
def tests_of_flash_attn(monkeypatch):
    """The module of flash-attn's tests on a CPU, with dilkit as flash-attn; what it does 250 times is done thrice."""
    if why := unavailable("flash_attn"):
        pytest.skip(why)
    file = Path(os.environ["DILKIT_FLASH_ATTN"]) / "tests" / "test_flash_attn.py"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=2**40))
    with flash_attn.install(replace=True):
        vars(sys.modules["flash_attn.flash_attn_interface"]).update(_get_block_size_n=lambda *_: 2**30, USE_TRITON_ROCM=False)
        for name in ("flash_attn.layers", "flash_attn.layers.rotary"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(apply_rotary_emb=turned)
        module = ModuleType("tests_of_flash_attn")
        exec(compile(file.read_text().replace('"cuda"', '"cpu"'), file, "exec"), vars(module))
        module.range = lambda *numbers: builtins.range(*numbers[:-1], min(numbers[-1], 3))
        yield module


def turned(x, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotate `x` `(batch, rows, heads, head_dim)` as complex numbers."""
    half, positions = cos.shape[1], seqlen_offsets[:, None] + torch.arange(x.shape[1])
    pairs = x[..., : 2 * half].float().unflatten(-1, (half, 2) if interleaved else (2, half))
    numbers = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous())
    pairs = torch.view_as_real(numbers * torch.complex(cos.float(), sin.float())[positions][:, :, None])
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2).to(x.dtype), x[..., 2 * half :]], -1)


def sampled(function, most, draw):
    """Draw different parameters of a test, of sequences of at most 1,025 rows; one in eight may have four times the pairs."""
    marks = [mark.args for mark in function.pytestmark if mark.name == "parametrize"]
    cases = {}
    for _ in range(100 * most):
        case = {}
        for names, values in marks:
            value = draw.choice([*values])
            case |= zip(names.split(","), value, strict=True) if "," in names else {names: value}
        lengths = [case[name] for name in ("seqlen", "seqlen_q", "seqlen_k") if name in case]
        pairs = math.prod(lengths) ** (1 if len(lengths) == 2 else 2) * (16 if "race" in function.__name__ else 1)
        if len(cases) < most and max(lengths, default=0) <= 1025 and pairs <= MOST_PAIRS * draw.choice([1] * 7 + [4]):
            cases[str(case)] = case
    return [*cases.values()]


@pytest.mark.timeout(3600)
def test_tests_of_flash_attn_pass(tests_of_flash_attn):
    draw, passed = random.Random(0), 0
    failures = []
    names = [name for name in vars(tests_of_flash_attn) if name.startswith("test_") and name[16:] not in NEWER]
    while names:
        function = getattr(tests_of_flash_attn, names.pop())
        most = (GRID - passed - len(failures)) // (len(names) + 1)
        for case in sampled(function, most, draw):
            try:
                function(**case)
                passed += 1
            except pytest.skip.Exception:  # softcap with dropout
                continue
            except Exception as error:
                failures.append(f"{function.__name__}({case}): {type(error).__name__}: {error}")
    assert not failures, failures
    assert passed > GRID / 2
