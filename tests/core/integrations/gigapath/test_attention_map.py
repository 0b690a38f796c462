"""What the class token looks at is its row of the layer's attention."""

from __future__ import annotations

import pytest
import torch
from helpers.slide_encoder import slide, small

from dilkit.integrations.gigapath import attention_map
from dilkit.oracle import oracle_attention


@pytest.mark.parametrize("layer", [0, 1, -1, -2])
def test_the_map_is_the_first_row_of_the_layer(layer):
    model, seen = small(global_pool=True), []  # so that the last layer computes all rows
    tiles, coords = (torch.cat(x) for x in zip(slide(20, 0), slide(20, 1), strict=True))
    module = model.layers()[layer].self_attn
    heads = module.heads
    module.heads = lambda x: seen.append(heads(x)) or seen[-1]
    found = attention_map(model, tiles, coords, layer)
    seen.clear()
    with torch.no_grad():
        model(tiles, coords)
    query, key, _ = (x.view(2, 21, 4, 12) for x in seen[0])
    unit = torch.eye(21, dtype=torch.float64)[None, :, None].expand(2, 21, 4, 21)
    right = oracle_attention(query, key, unit, model.config.pattern)[0].transpose(1, 2)[:, :, 0, 1:]
    assert found.shape == (2, 4, 20)
    assert not found.requires_grad
    assert (found - right).abs().max() <= 1e-12
    assert found.count_nonzero(dim=-1).tolist() == 2 * [[13, 11, 7, 7]]


@pytest.mark.parametrize("part", ["", "encoder.layers.1"])
def test_a_model_in_training_is_refused(part):
    model = small(dropout=0.25)
    model.get_submodule(part).train()
    with pytest.raises(ValueError, match=r"training mode with dropout=0\.25.*model\.eval\(\)"):
        attention_map(model, *slide(20))
    model.eval()
    assert torch.equal(attention_map(model, *slide(20)), attention_map(model, *slide(20)))
    assert attention_map(small(dropout=0.0).train(), *slide(20)).isfinite().all()  # nothing is drawn


@pytest.mark.parametrize("layer", [2, -3])
def test_a_layer_that_is_not_there(layer):
    with pytest.raises(IndexError, match=f"layer={layer} is not there: the model has 2 layers, 0 to 1"):
        attention_map(small(), *slide(5), layer)
