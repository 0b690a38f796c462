"""Models of transformers with their heads over ranks, by transformers' own plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import launch
from helpers.language_models import gpt_oss, llama, transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from dilkit import BlockSparse, Pattern, SlidingWindow
from dilkit.comm import Comm

transformers()
from transformers import AutoModelForCausalLM  # noqa: E402

from dilkit.integrations.transformers import register  # noqa: E402
from dilkit.integrations.transformers.attention import attend  # noqa: E402

TOKENS = torch.arange(40)[None] % 60 + 3
HEADS = 4
DIFFER = {
    "modulo": Pattern([4, 16], [1, 2]),
    "block": Pattern([4, 16], [1, 2], offset="block"),
    "one range": Pattern.of(SlidingWindow(9, heads=(0, 2))),
    "ranges": Pattern.of(SlidingWindow(4), SlidingWindow(9, heads=(0, 2))),
    "layouts": Pattern.of(BlockSparse.bigbird(5, 8, random_blocks=1, heads=HEADS)),
}
"""Patterns of which heads see different keys."""
DTYPES = ((torch.float32, 2e-5), (torch.bfloat16, 4e-2))


def computed(folder: Path, name: str, dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
    """Logits and all gradients of a loss, whole."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, dtype=dtype, **how)
    logits = model(TOKENS).logits
    logits.float().square().mean().backward()
    return dict(logits=logits, **{name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def compare(folder: Path, name: str, dtype: torch.dtype, close: float) -> None:
    """Attention that finds its heads by itself, and one that is told them, against one process."""
    alone = computed(folder, "dilkit", dtype)
    for implementation in ("dilkit", "dilkit_mesh"):
        split = computed(folder, implementation, dtype, tp_plan="auto")
        assert split.keys() == alone.keys()
        for key, expected in alone.items():
            where = f"{folder.name}, {name}, {key}: "
            assert_close(split[key], expected, atol=close, rtol=close, msg=where.__add__)


def compare_compiled(folder: Path) -> None:
    """One graph, in which the heads' places are constants."""
    split = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilkit", tp_plan="auto")
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)
    assert_close(compiled(TOKENS, use_cache=False).logits, split(TOKENS).logits)


def stored_over_ranks(folder: Path, mesh: Any) -> None:
    """A part of the heads, and projections that FSDP cuts over as many ranks: which heads these are is not known."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilkit")
    layer = model.model.layers[0].self_attn
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        fully_shard(projection, mesh=mesh)
    held = torch.randn(1, HEADS // mesh.size(), 40, 8)
    with pytest.raises(ValueError, match="which of them these are is not known"):
        attend(DIFFER["modulo"], None, layer, held, held, held, None)


def all_models(world: Comm, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    for name, pattern in DIFFER.items():
        register(pattern)
        register(pattern, "dilkit_mesh", mesh=mesh["tp"])
        for model in sorted(folder.iterdir()):
            for dtype, close in DTYPES:
                compare(model, name, dtype, close)
    register(DIFFER["block"])
    compare_compiled(folder / "llama")
    stored_over_ranks(folder / "llama", mesh["tp"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism(tmp_path: Path, ranks: int) -> None:
    """The weights are DTensors, and say which heads a rank has."""
    llama(num_key_value_heads=4).save_pretrained(tmp_path / "llama")
    gpt_oss(num_key_value_heads=4).save_pretrained(tmp_path / "gpt_oss")
    if ranks == 2:
        llama().save_pretrained(tmp_path / "llama of grouped heads")
    launch.run("gloo", ranks, all_models, tmp_path, limit=240)
