"""The slide encoder: equal to the procedure written out, its attention maps, and coordinates that lie as no tiles do."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from helpers.live_bytes import LiveBytes
from helpers.pairwise import every_pair
from helpers.slide_encoder import LENGTHS, SMALL, embeddings, slide, small

from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig, attention_map
from dilkit.integrations.gigapath.config import segment_lengths_of
from dilkit.integrations.gigapath.positions import commonest_step, settled_tile_size
from dilkit.oracle import oracle_attention

TILES = (1, 2, 7, 15, 31, 32, 40, 45, 70)
"""With the class token: less than a segment, whole segments, and short ones, some of fewer rows than a rate."""


@pytest.mark.parametrize(("n", "tail", "global_pool"), every_pair(TILES, ["exact", "zeros"], [False, True]))
def test_every_layer_is_that_of_the_procedure(n, tail, global_pool):
    model = small(tail=tail, global_pool=global_pool)
    tiles, coords = slide(n)
    *layers, last = embeddings(model.state_dict(), model.config, tiles[0], coords[0])
    with torch.no_grad():
        found = [*model(tiles, coords, all_layer_embed=True), *model(tiles, coords)]
    assert len(found) == model.config.depth + 2
    for ours, theirs in zip(found, [*layers, last], strict=True):
        assert (ours[0] - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_procedure(checkpointing):
    model = small()
    model.activation_checkpointing = checkpointing
    tiles, coords = slide(21)
    model(tiles.requires_grad_(), coords)[0].sum().backward()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.state_dict().items()}
    other = tiles.detach().clone().requires_grad_()
    embeddings(weights, model.config, other[0], coords[0])[-1].sum().backward()
    assert (tiles.grad - other.grad).abs().max() <= 1e-11
    for name, weight in model.named_parameters():
        assert (weight.grad - weights[name].grad).abs().max() <= 1e-10, name


@pytest.mark.parametrize("tail", ["exact", "zeros"])
def test_a_slide_in_a_batch_is_that_slide_alone(tail):
    model, lengths = small(tail=tail), (40, 3, 17)
    tiles = torch.full((3, 40, SMALL["in_chans"]), float("nan"), dtype=torch.float64)
    coords, mask = torch.full((3, 40, 2), -1), torch.ones(3, 40, dtype=torch.bool)
    for i, n in enumerate(lengths):
        tiles[i, 40 - n :], coords[i, 40 - n :] = (x[0] for x in slide(n, i))
        mask[i, 40 - n :] = False
    with torch.no_grad():
        together = model(tiles, coords, mask, all_layer_embed=True)
        for i, n in enumerate(lengths):
            for ours, alone in zip(together, model(*slide(n, i), all_layer_embed=True), strict=True):
                assert (ours[i] - alone[0]).abs().max() <= 1e-13
        both = (torch.cat((x[2:, 23:], y)) for x, y in zip((tiles, coords), slide(17, 2), strict=True))
        *_, without_mask = model(*both, all_layer_embed=True)
        assert (without_mask - together[-1][2]).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.uint32, torch.float32, torch.float64])
def test_coordinates_of_any_dtype(dtype):
    coords = torch.tensor([[0, 256], [255, 5119], [2560, 511]]).to(dtype)
    assert small().positions.cells(coords, 256).tolist() == [[0, 1], [0, 19], [10, 1]]


def sized(tile_size, *slides):
    with torch.no_grad():
        return small(tile_size=tile_size)(*slides)[0]


def test_the_tile_size_and_pooling_can_be_set_later():
    model, slides = small(), slide(40)
    wide = (slides[0], 2 * slides[1])  # tiles of 512 pixels, each in a cell of its own
    with torch.no_grad():
        assert torch.equal(model(*slides)[0], sized(256, *slides))
        model.tile_size = np.int64(512)
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert one.tile_size == one.config.tile_size == 512
            assert torch.allclose(one(*wide)[0], sized(256, *slides), rtol=0, atol=1e-12)
        model.tile_size, model.global_pool = 256, True
        assert torch.equal(model(*slides)[0], small(global_pool=True)(*slides)[0])


@pytest.mark.slow
def test_the_tile_size_of_a_compiled_encoder_can_be_set_later():
    model, slides = small(tile_size=512), slide(40)
    wide = (slides[0], 2 * slides[1])
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        assert compiled.tile_size == compiled.config.tile_size == 512
        assert torch.allclose(compiled(*wide)[0], sized(256, *slides), rtol=0, atol=1e-12)
        compiled.tile_size = 256
        assert torch.allclose(compiled(*slides)[0], sized(256, *slides), rtol=0, atol=1e-12)
    assert model.tile_size == 256


def placed(*place):
    coords = torch.zeros(1, 5, 2, dtype=torch.float64)
    coords[0, 1] = torch.tensor(place)
    return dict(coords=coords)


OUTSIDE = r"tile 1 of 5 is at .* and 1 lie outside the grid of 20 x 20 .* 0 to 5119 is needed"


REFUSED = {
    ValueError: [
        *((placed(*place), OUTSIDE) for place in ((-1, 0), (0, -0.5), (5120, 0), (0, 1e30), (float("nan"), 0))),
        (dict(coords=torch.zeros(1, 5, 2, device="meta")), r"coords is on meta but the model on cpu; .*\.to\('cpu'\)"),
        (dict(tiles=torch.zeros(5, 10)), r"tiles has shape \(5, 10\); \(batch, n, in_chans=10\)"),
        (dict(tiles=torch.zeros(1, 5, 9)), r"tiles has shape \(1, 5, 9\)"),
        (dict(coords=torch.zeros(1, 4, 2)), r"coords has shape \(1, 4, 2\); .* \(1, 5, 2\)"),
        (dict(key_padding_mask=torch.zeros(1, 5)), "key_padding_mask is torch.float32"),
        (dict(key_padding_mask=torch.zeros(1, 6, dtype=torch.bool)), r"torch.bool \(1, 6\)"),
        (
            dict(key_padding_mask=torch.ones(1, 5).bool()),
            "slide 0 of 1 has no tiles.*True where there is no tile: ~mask if yours",
        ),
        (dict(tiles=torch.zeros(1, 0, 10), coords=torch.zeros(1, 0, 2)), "slide 0 of 1 has no tiles; leave it out$"),
        (dict(tiles=torch.zeros(0, 5, 10), coords=torch.zeros(0, 5, 2)), "tiles has no slides"),
    ],
    TypeError: [
        (dict(tiles=[[0.0]]), "tiles is a list; a torch.Tensor is needed"),
        (dict(coords=None), "coords is a NoneType"),
        (dict(key_padding_mask=3), "key_padding_mask is a int"),
        (dict(tiles=torch.zeros(1, 5, 10).double()), r"tiles is torch.float64 but the model torch.float32; convert"),
        (dict(tiles=torch.zeros(1, 5, 10).long()), r"tiles is torch.int64"),
        *(
            (
                dict(coords=torch.zeros(1, 5, 2, dtype=dtype)),
                f"coords is {dtype}, which does not hold every pixel; integers or fl",
            )
            for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.complex64)
        ),
    ],
}


@pytest.mark.parametrize(("error", "change", "message"), [(error, *row) for error, rows in REFUSED.items() for row in rows])
def test_tensors_that_do_not_fit_are_named(error, change, message):
    with pytest.raises(error, match=message):
        small().float()(**dict(tiles=torch.zeros(1, 5, 10), coords=torch.zeros(1, 5, 2)) | change)


def test_autocast_takes_tiles_of_any_floating_dtype():
    model, (tiles, coords) = small().float(), slide(20)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = [model(tiles.to(dtype), coords)[0] for dtype in (torch.float32, torch.bfloat16)]
        assert torch.allclose(*found, atol=0.3)
        with pytest.raises(TypeError, match=r"tiles is torch\.int64"):
            model(tiles.long(), coords)


@pytest.mark.parametrize("global_pool", [False, True])
def test_under_autocast_rows_are_summed_in_the_dtype_of_the_model(global_pool):
    """GigaPath sums so: half types round each sum, and float16 ends at 65,504."""
    model, (tiles, coords) = small(global_pool=global_pool, depth=8), slide(40)
    model.cls_token.data += 1e5
    with torch.no_grad():
        right = model(tiles, coords, all_layer_embed=True)
        with torch.autocast("cpu", dtype=torch.float16):
            found = model.float()(tiles.float(), coords, all_layer_embed=True)
    for ours, exact in zip(found, right, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).abs().max() < 0.1


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("embed_dim", 50, ValueError),
        ("depth", 0, ValueError),
        ("ngrids", 1.5, TypeError),
        ("dropout", 1.0, ValueError),
        ("drop_path", -0.1, ValueError),
        ("tail", "some", ValueError),
        ("segment_lengths", (8, 16), ValueError),
        ("global_pool", 1, TypeError),
        ("tile_size", 0, ValueError),
        ("tile_size", 256.0, TypeError),
        ("tile_size", True, TypeError),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(field, value, error):
    with pytest.raises(error, match=field):
        SlideEncoderConfig(**dict(SMALL, segment_lengths=LENGTHS) | {field: value})
    if field in ("global_pool", "tile_size"):
        model = small()
        with pytest.raises(error, match=field):
            setattr(model, field, value)
        assert model.config == small().config


def test_a_configuration_does_not_change_with_what_it_was_made_of():
    lengths = [8, 16, 32]
    config = SlideEncoderConfig(**SMALL, segment_lengths=lengths, tile_size=np.int64(256))
    lengths[0] = 4
    assert config == small().config
    assert str(config) == str(small().config)
    assert segment_lengths_of() == SlideEncoderConfig().segment_lengths == (1024, 5792, 32768, 185363, 1048576)


def test_drop_path_leaves_out_whole_slides():
    model = small(dropout=0.0, drop_path=0.5)
    layer, lengths, x = model.layers()[1].train(), [3, 5] * 50, torch.randn(400, 48, dtype=torch.float64)
    torch.manual_seed(1)
    kept = layer.draw(x, len(lengths))
    assert kept.unique().tolist() == [0.0, 2.0]
    assert not torch.equal(*kept)
    left_out = torch.zeros(2, 100, 1, dtype=torch.float64)
    assert torch.equal(layer(x, lengths, model.attention, left_out), x)
    whole, found = (layer(x, lengths, model.attention, factors=one).split(lengths) for one in (left_out + 1, kept))
    for i in range(100):  # a slide stays as it is where both summands are left out
        assert torch.equal(found[i], x.split(lengths)[i]) == (not kept[:, i].any())
    assert all(torch.equal(a, b) for a, b in zip(layer(x, lengths, model.attention).split(lengths), whole, strict=True))


def test_a_layer_in_pieces_is_the_whole(monkeypatch):
    model = small()
    x, lengths = model.packed(*slide(30))
    layer = model.layers()[1]
    whole = layer(x, lengths, model.attention)
    monkeypatch.setattr("dilkit.integrations.gigapath.layers.CHUNK", 7)
    with torch.no_grad():
        assert torch.allclose(layer(x, lengths, model.attention), whole, rtol=0, atol=1e-13)


def test_without_gradients_a_layer_holds_few_tensors():
    """It holds its result, queries, keys and values, but no hidden rows, which are four times as wide."""
    config = SlideEncoderConfig(embed_dim=128, depth=1, num_heads=4, segment_lengths=(64,), dilation_rates=(1,))
    model = SlideEncoder(config).eval()
    x, [layer] = torch.randn(30_000, 128), model.layers()
    with torch.no_grad(), LiveBytes(x, *model.parameters()) as held:
        layer(x, [len(x)], model.attention)
    assert 4 * x.nbytes < held.peak < 5.5 * x.nbytes


@pytest.mark.parametrize(("default", "device"), [("meta", None), ("cpu", "meta"), ("meta", "cpu")])
def test_it_can_be_made_on_the_meta_device(default, device):
    model = small()
    with torch.device(default):
        made = SlideEncoder(model.config, device=device, dtype=torch.float64)
    assert {x.device.type for x in (*made.parameters(), *made.buffers())} == {device or default}
    loaded = made if device == "cpu" else made.to_empty(device="cpu")
    loaded.eval().load_state_dict(model.state_dict())
    assert torch.equal(loaded(*slide(11))[0], model(*slide(11))[0])


@pytest.mark.parametrize("layer", [0, 1, -1, -2])
def test_the_map_is_the_first_row_of_the_layer(layer):
    model, seen = small(global_pool=True), []  # so that the last layer computes all rows
    tiles, coords = (torch.cat(x) for x in zip(slide(20, 0), slide(20, 1), strict=True))
    module = model.layers()[layer].self_attn
    heads = module.heads
    module.heads = lambda x: seen.append(heads(x)) or seen[-1]
    found, mean = (attention_map(model, tiles, coords, layer, of_tiles=mean) for mean in (False, True))
    seen.clear()
    with torch.no_grad():
        model(tiles, coords)
    query, key, _ = (x.view(2, 21, 4, 12) for x in seen[0])
    unit = torch.eye(21, dtype=torch.float64)[None, :, None].expand(2, 21, 4, 21)
    weights = oracle_attention(query, key, unit, model.config.pattern)[0].transpose(1, 2)
    right = weights[:, :, 0, 1:]
    assert (mean - weights[:, :, 1:, 1:].mean(dim=2)).abs().max() <= 1e-12
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


def block(columns=10, rows=10, step=256):
    """Tiles side by side, `(1, n, in_chans)` and `(1, n, 2)`, in no order."""
    coords = step * torch.cartesian_prod(torch.arange(columns), torch.arange(rows))
    n, generator = len(coords), torch.Generator().manual_seed(0)
    tiles = torch.randn(1, n, SMALL["in_chans"], dtype=torch.float64, generator=generator)
    return tiles, coords[torch.randperm(n, generator=generator)][None]


def said(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(one.filename == __file__ for one in found), "it points at the call of the model"
    return [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (256, None),
        (512, "coords: most neighbours are 512 pixels apart and tile_size is 256; set tile_size=512"),
        (300, "coords: most neighbours are 300 pixels apart"),
        (128, "coords: 100 of 100 tiles share a cell of 256 x 256 pixels, 25 cells in all; unless tiles overlap"),
        (224, "coords: 64 of 100 tiles share a cell of 256 x 256 pixels, 64 cells in all"),
    ],
)
def test_tiles_of_another_size_are_warned_of(step, text):
    model = small()
    found = said(lambda: model(*block(step=step)))
    assert found == [] if text is None else [one for one in found if one.startswith(text)] == found != []
    model.tile_size = step
    assert said(lambda: model(*block(step=step))) == []


def test_numbers_of_tiles_are_no_pixels():
    with pytest.raises(ValueError, match="most neighbours are 1 apart: coords are numbers of tiles, and pixels are needed"):
        settled_tile_size(None, None, block(step=1)[1][0])
    with pytest.raises(ValueError, match=r"100 of 100 tiles share a cell .* 1 cells in all, where at most 16 .* set tile_size"):
        small()(*block(step=1))
    with pytest.raises(ValueError, match="coords may be tile numbers"):
        attention_map(small(), *block(step=1))


def test_each_slide_of_a_batch_is_looked_at_by_itself():
    model, (tiles, coords) = small(), (x.repeat(3, 1, 1) for x in block())
    mask = torch.zeros(3, 100, dtype=torch.bool)
    mask[2, 30:] = True
    coords[2, 30:] = 0
    assert said(lambda: model(tiles, coords, mask)) == []
    assert [one.partition(":")[0] for one in said(lambda: model(tiles, coords))] == ["coords of slide 2"]
    coords[1] *= 2
    assert [one.partition(":")[0] for one in said(lambda: model(tiles, coords, mask))] == ["coords of slide 1"]


def test_a_few_that_overlap_and_slides_of_a_few_tiles_are_no_matter():
    tiles, coords = block()
    coords[0, :2] = coords[0, 2:4] + 5
    assert said(lambda: small()(tiles, coords)) == []
    assert said(lambda: small()(*block(columns=4, rows=2, step=512))) == []
    assert said(lambda: small()(*slide(300))) == []


@pytest.mark.parametrize(
    ("coords", "step"),
    [
        (block(step=512)[1][0], 512),
        (block(step=512)[1][0, :40], 512),  # a random part of the slide
        (block(step=512)[1][0].double() + 0.2, 512),
        (block(columns=1, rows=100)[1][0], None),  # a column has no neighbours in a row
        (torch.zeros(50, 2), None),
        (slide(300)[1][0], None),
        (torch.zeros(1, 2), None),
    ],
)
def test_the_commonest_step(coords, step):
    assert commonest_step(coords) == step
