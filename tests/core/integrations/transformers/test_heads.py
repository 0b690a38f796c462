"""Heads have places: a part of a model's heads has to say which they are, where the pattern differs by head."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.language_models import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from dilkit import BlockSparse, DilatedSegment, Pattern, SlidingWindow

transformers()
from dilkit.integrations.transformers import register  # noqa: E402
from dilkit.integrations.transformers.attention import attend  # noqa: E402

HEADS, KV_HEADS = 8, 4
SEQ = 40


class Layer(nn.Module):
    """What an attention layer of 8 query and 4 key/value heads has."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, **config)


@dataclass(frozen=True)
class Mesh:
    """What is asked of a `DeviceMesh` of one dimension."""

    rank: int
    ranks: int
    ndim: int = 1

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.ranks


def computed(
    pattern: Pattern, first: int = 0, kv_heads: int = KV_HEADS, layer: Layer | None = None, mesh: Any = None, **options: Any
) -> Tensor:
    """What the layer gives key/value heads from `first` on, and their query heads."""
    torch.manual_seed(4)
    group = HEADS // KV_HEADS
    q, (k, v) = torch.randn(2, HEADS, SEQ, 8), torch.randn(2, 2, KV_HEADS, SEQ, 8).unbind()
    mine, queries = slice(first, first + kv_heads), slice(first * group, (first + kv_heads) * group)
    return attend(pattern, mesh, layer or Layer(), q[:, queries], k[:, mine], v[:, mine], None, **options)[0]


DIFFERS = {
    "dilated": Pattern([16, 64], [1, 4]),
    "dilated by blocks": Pattern([16, 64], [1, 4], offset="block"),
    "a range": Pattern.of(SlidingWindow(4), SlidingWindow(9, heads=(0, 2))),
    "layouts": Pattern.of(BlockSparse.bigbird(5, 8, random_blocks=1, heads=HEADS)),
}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("pattern", DIFFERS)
def test_a_part_of_the_heads_is_refused_where_the_pattern_differs_by_head(pattern: str, kv_heads: int) -> None:
    with pytest.raises(ValueError, match=rf"Layer has {2 * kv_heads} of the 8 heads of the model.*head_shard=\(first, total\)"):
        computed(DIFFERS[pattern], 2, kv_heads)


def test_key_value_heads_alone_may_be_a_part() -> None:
    q, kv = torch.randn(1, HEADS, SEQ, 8), torch.randn(1, 2, SEQ, 8)
    with pytest.raises(ValueError, match="Layer has 2 of the 4 key/value heads of the model"):
        attend(DIFFERS["dilated"], None, Layer(), q, kv, kv, None)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_a_pattern_that_says_which_heads_they_are_gives_what_all_heads_give(offset: str, first: int) -> None:
    whole = computed(Pattern([16, 64], [1, 4], offset=offset))
    part = computed(Pattern([16, 64], [1, 4], offset=offset, head_shard=(first, KV_HEADS)), first, 2)
    assert_close(part, whole[:, :, 2 * first : 2 * first + 4])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", DIFFERS)
def test_a_mesh_says_which_heads_they_are(pattern: str, ranks: int) -> None:
    """As under DeepSpeed's Ulysses: local heads, the whole sequence, and the sinks of all heads."""
    sinks, held = torch.linspace(-1, 3, HEADS), KV_HEADS // ranks
    whole = computed(DIFFERS[pattern], s_aux=sinks)
    parts = [computed(DIFFERS[pattern], t * held, held, mesh=Mesh(t, ranks), s_aux=sinks) for t in range(ranks)]
    assert_close(torch.cat(parts, 2), whole)


def test_a_mesh_that_shares_out_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Layer has 2 of the 8 heads of the model.*has 2 ranks.*4 / 2; give the mesh"):
        computed(DIFFERS["dilated"], 0, 1, mesh=Mesh(0, 2))


@pytest.mark.parametrize(
    ("mesh", "kind", "text"), [(Mesh(0, 2, 2), ValueError, "has 2 dimensions; name"), (3, TypeError, "mesh=3 is a int")]
)
def test_what_is_no_mesh_is_refused(mesh: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        register(DIFFERS["dilated"], "dilkit_refused", mesh=mesh)


def test_sinks_of_all_heads_are_taken_by_a_pattern_that_says_its_heads() -> None:
    sinks, pattern = torch.linspace(-1, 3, HEADS), Pattern([16, 64], [1, 4], head_shard=(1, KV_HEADS))
    whole = computed(Pattern([16, 64], [1, 4]), s_aux=sinks)
    assert_close(computed(pattern, 1, 2, s_aux=sinks), whole[:, :, 2:6])


def test_sinks_of_all_heads_are_refused_where_nothing_says_which_are_there() -> None:
    with pytest.raises(ValueError, match=r"Layer has 2 of the 8 heads.*sinks, s_aux, are those of all"):
        computed(Pattern.of(SlidingWindow(5)), 0, 1, s_aux=torch.zeros(HEADS))


def test_heads_that_no_branch_serves() -> None:
    pattern = Pattern.of(SlidingWindow(4, heads=(0, 4)))
    whole, mine = computed(pattern), computed(pattern, 2, 2, mesh=Mesh(1, 2))
    assert_close(mine, whole[:, :, 4:])
    assert not mine.any()


def test_a_shard_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is for 5 key/value heads in all, and the model has 4; give head_shard=\(first, 4\)"):
        computed(Pattern([16, 64], [1, 4], offset="block", head_shard=(0, 5)), 0, 2)


def test_a_pattern_that_is_the_same_for_all_heads_takes_any() -> None:
    pattern = Pattern.of(SlidingWindow(5), DilatedSegment(8, 1))
    assert_close(computed(pattern, 1, 2), computed(pattern)[:, :, 2:6])


def test_heads_that_differ_by_layer() -> None:
    layer = Layer(is_heterogeneous=True, per_layer_config=[SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)])
    layer.layer_idx = 0
    assert computed(DIFFERS["dilated"], 0, 2, layer).shape == (2, SEQ, 4, 8)
    with pytest.raises(ValueError, match="Layer has 2 of the 4 heads"):
        computed(DIFFERS["dilated"], 0, 1, layer)
