"""A slide over ranks: every rank returns what one computes alone."""

from __future__ import annotations

import pytest
import torch
from helpers.slide_encoder import slide, small

from dilkit.comm import run_threads
from dilkit.integrations.gigapath import SlideEncoder, attention_map


def over_ranks(size, model, work):
    """`work(model over ranks)` on each rank, the parameters being those of `model`."""

    def on_rank(comm):
        mine = SlideEncoder(model.config, comm=comm, dtype=torch.float64).eval()
        mine.load_state_dict(model.state_dict())
        with torch.no_grad():
            return work(mine)

    return run_threads(size, on_rank)


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("tail", ["exact", "zeros"])
@pytest.mark.parametrize(("size", "n"), [(1, 40), (2, 40), (3, 45), (3, 2)])
def test_every_rank_returns_the_embedding(size, n, tail, global_pool):
    model, (tiles, coords) = small(tail=tail, global_pool=global_pool), slide(n)
    with torch.no_grad():
        right = [*model(tiles, coords, all_layer_embed=True), *model(tiles, coords)]
    for found in over_ranks(size, model, lambda m: [*m(tiles, coords, all_layer_embed=True), *m(tiles, coords)]):
        assert len(found) == len(right)
        assert all((ours - alone).abs().max() <= 1e-12 for ours, alone in zip(found, right, strict=True))


def test_a_mask_leaves_tiles_out():
    model, (tiles, coords) = small(), slide(30)
    mask = torch.arange(30)[None] % 4 == 1
    with torch.no_grad():
        (right,) = model(tiles, coords, mask)
    for (found,) in over_ranks(2, model, lambda m: m(tiles, coords, mask)):
        assert (found - right).abs().max() <= 1e-12


def refusal(call):
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    return str(caught.value)


def test_what_is_refused_is_refused_on_every_rank():
    (tiles, coords), model = slide(30), small()
    far = coords.clone()
    far[0, 29] = 6000  # a tile of the last rank

    def work(mine):
        with torch.enable_grad():
            gradients = refusal(lambda: mine(tiles, coords))
        several = refusal(lambda: mine(tiles.repeat(2, 1, 1), coords.repeat(2, 1, 1)))
        return gradients, several, refusal(lambda: mine(tiles, far)), refusal(lambda: attention_map(mine, tiles, coords))

    for gradients, several, outside, mapped in over_ranks(2, model, work):
        assert "no gradients are computed over ranks" in gradients
        assert "tiles has 2 slides" in several
        assert "tile 29 of 30" in outside
        assert "model is over ranks" in mapped


def test_what_is_no_transport_is_named():
    with pytest.raises(TypeError, match="comm=3 is a int"):
        SlideEncoder(small().config, comm=3)
