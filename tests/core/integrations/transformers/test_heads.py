"""A part of a model's heads says which they are where the pattern differs by head: by itself, a mesh, or transformers' plan."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import launch
from helpers.language_models import gpt_oss, llama, transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from dilkit import BlockSparse, DilatedSegment, Pattern, SlidingWindow
from dilkit.comm import Comm

transformers()
from transformers import AutoModelForCausalLM  # noqa: E402

from dilkit.integrations.transformers import register  # noqa: E402
from dilkit.integrations.transformers.attention import attend  # noqa: E402

HEADS, KV_HEADS = 8, 4
SEQ = 40


class Layer(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, **config)


def mesh_of(rank: int, ranks: int, ndim: int = 1):
    return SimpleNamespace(ndim=ndim, get_local_rank=lambda: rank, size=lambda: ranks)


def computed(
    pattern: Pattern, first: int = 0, kv_heads: int = KV_HEADS, layer: Layer | None = None, mesh=None, **options
) -> Tensor:
    torch.manual_seed(4)
    group = HEADS // KV_HEADS
    q, (k, v) = torch.randn(2, HEADS, SEQ, 8), torch.randn(2, 2, KV_HEADS, SEQ, 8).unbind()
    mine, queries = slice(first, first + kv_heads), slice(first * group, (first + kv_heads) * group)
    return attend(pattern, mesh, layer or Layer(), q[:, queries], k[:, mine], v[:, mine], None, **options)[0]


def of_layer(kv_heads: int) -> Tensor:
    layer = Layer(**HETEROGENEOUS)
    layer.layer_idx = 0
    return computed(DIFFERS["dilated"], 0, kv_heads, layer)


DIFFERS = {
    "dilated": Pattern([16, 64], [1, 4]),
    "dilated by blocks": Pattern([16, 64], [1, 4], offset="block"),
    "a range": Pattern.of(SlidingWindow(4), SlidingWindow(9, heads=(0, 2))),
    "heads that no branch serves": Pattern.of(SlidingWindow(9, heads=(0, 2))),
    "layouts": Pattern.of(BlockSparse.bigbird(5, 8, random_blocks=1, heads=HEADS)),
}


SINKS = torch.linspace(-1, 3, HEADS)
HETEROGENEOUS = dict(is_heterogeneous=True, per_layer_config=[SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)])
OTHER_SHARD = Pattern([16, 64], [1, 4], offset="block", head_shard=(0, 5))
A_PART = r"Layer has {} of the 8 heads of the model.*head_shard=\(first, total\)"
REFUSED = {
    **{name: (partial(computed, pattern, 2, 1), A_PART.format(2)) for name, pattern in DIFFERS.items()},
    **{f"more of {name}": (partial(computed, pattern, 2, 2), A_PART.format(4)) for name, pattern in DIFFERS.items()},
    "key/value heads": (
        lambda: attend(DIFFERS["dilated"], None, Layer(), torch.randn(1, HEADS, SEQ, 8), *torch.randn(2, 1, 2, SEQ, 8), None),
        "Layer has 2 of the 4 key/value heads of the model",
    ),
    "a mesh of other heads": (
        partial(computed, DIFFERS["dilated"], 0, 1, mesh=mesh_of(0, 2)),
        r"Layer has 2 of the 8 heads of the model.*has 2 ranks.*4 / 2; give the mesh",
    ),
    "sinks of all heads": (
        partial(computed, Pattern.of(SlidingWindow(5)), 0, 1, s_aux=SINKS),
        r"Layer has 2 of the 8 heads.*sinks, s_aux, are those of all",
    ),
    "a shard of another model": (
        partial(computed, OTHER_SHARD, 0, 2),
        r"is for 5 key/value heads in all, and the model has 4; give head_shard=\(first, 4\)",
    ),
    "a part of a layer": (partial(of_layer, 1), "Layer has 2 of the 4 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_nothing_places_are_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_heads_that_differ_by_layer():
    assert of_layer(2).shape == (2, SEQ, 4, 8)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_a_pattern_says_which_heads_they_are(offset, first):
    whole = computed(Pattern([16, 64], [1, 4], offset=offset), s_aux=SINKS)
    part = computed(Pattern([16, 64], [1, 4], offset=offset, head_shard=(first, KV_HEADS)), first, 2, s_aux=SINKS)
    assert_close(part, whole[:, :, 2 * first : 2 * first + 4])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", DIFFERS)
def test_a_mesh_says_which_heads_they_are(pattern, ranks):
    held, whole = KV_HEADS // ranks, computed(DIFFERS[pattern], s_aux=SINKS)
    parts = [computed(DIFFERS[pattern], t * held, held, mesh=mesh_of(t, ranks), s_aux=SINKS) for t in range(ranks)]
    assert_close(torch.cat(parts, 2), whole)


@pytest.mark.parametrize(
    ("mesh", "kind", "text"), [(mesh_of(0, 2, 2), ValueError, "has 2 dimensions; name"), (3, TypeError, "mesh=3 is a int")]
)
def test_what_is_no_mesh_is_refused(mesh, kind, text):
    with pytest.raises(kind, match=text):
        register(DIFFERS["dilated"], "dilkit_refused", mesh=mesh)


def test_a_pattern_that_is_the_same_for_all_heads_takes_any():
    pattern = Pattern.of(SlidingWindow(5), DilatedSegment(8, 1))
    assert_close(computed(pattern, 1, 2), computed(pattern)[:, :, 2:6])


TOKENS = torch.arange(SEQ)[None] % 60 + 3
DTYPES = ((torch.float32, 2e-5), (torch.bfloat16, 4e-2))


def trained(folder: Path, name: str, dtype: torch.dtype, **how) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, dtype=dtype, **how)
    logits = model(TOKENS).logits
    logits.float().square().mean().backward()
    found = dict(logits=logits, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def compare(folder: Path, pattern: str, dtype: torch.dtype, close: float):
    alone = trained(folder, "dilkit", dtype)
    for implementation in ("dilkit", "dilkit_mesh"):
        split = trained(folder, implementation, dtype, tp_plan="auto")
        assert split.keys() == alone.keys()
        for key, expected in alone.items():
            where = f"{folder.name}, {pattern}, {key}: "
            assert_close(split[key], expected, atol=close, rtol=close, msg=where.__add__)


def compare_compiled(folder: Path):
    split = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilkit", tp_plan="auto")
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    assert_close(compiled(TOKENS, use_cache=False).logits, split(TOKENS).logits)


def stored_over_ranks(folder: Path, mesh):
    """FSDP cuts projections of a part of the heads, so that these heads are unknown."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilkit")
    layer = model.model.layers[0].self_attn
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        fully_shard(projection, mesh=mesh)
    q, k = (torch.randn(1, heads // mesh.size(), SEQ, 4) for heads in (HEADS, KV_HEADS))
    with pytest.raises(ValueError, match="it is unknown which heads these are"):
        attend(DIFFERS["dilated"], None, layer, q, k, k, None)


def all_models(world: Comm, folder: Path):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    for name, pattern in DIFFERS.items():
        register(pattern)
        register(pattern, "dilkit_mesh", mesh=mesh["tp"])
        for model in sorted(folder.iterdir()):
            for dtype, close in DTYPES:
                compare(model, name, dtype, close)
    register(DIFFERS["dilated by blocks"])
    compare_compiled(folder / "Llama")
    stored_over_ranks(folder / "Llama", mesh["tp"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tensor_parallelism(tmp_path):
    for make in (llama, gpt_oss):
        make(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS).save_pretrained(tmp_path / make.args[0])
    launch.run("gloo", 2, all_models, tmp_path, limit=240)
