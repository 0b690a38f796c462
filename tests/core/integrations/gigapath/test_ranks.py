"""A slide over ranks: every rank returns what one computes alone."""

import re

import pytest
import torch
from helpers.pairwise import every_pair
from helpers.slide_encoder import slide, small

from dilkit.comm import run_threads, sum_over_ranks
from dilkit.integrations.gigapath import SlideEncoder, attention_map


def on_ranks(size, model, work, change=lambda mine, rank: None):
    """Return `work(model over ranks)` of each rank, whose model has the parameters of `model` and is changed by `change`."""

    def on_rank(comm):
        checkpointing = model.activation_checkpointing
        mine = SlideEncoder(model.config, comm=comm, dtype=torch.float64, activation_checkpointing=checkpointing)
        mine.load_state_dict(model.state_dict())
        change(mine.train(model.training), comm.rank)
        return work(mine, comm)

    return run_threads(size, on_rank)


def trained(model, comm, *call, **options):
    model.zero_grad()
    found = model(*call, **options)
    sum(((i + 1) * x.cos() * torch.arange(x.numel())).sum() for i, x in enumerate(found)).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if comm is not None:
        sum_over_ranks(gradients.values(), comm)
    return [x.detach() for x in found], gradients


def check(size, model, *call, change=lambda mine, rank: None, **options):
    change(model, 0)
    embeddings, right = trained(model, None, *call, **options)
    scale = max(grad.abs().max() for grad in right.values())
    results = on_ranks(size, model, lambda mine, comm: trained(mine, comm, *call, **options), change)
    (_, first), *others = results
    assert all(torch.equal(first[name], found[name]) for _, found in others for name in first)
    assert list(first) == list(right)
    for name, grad in right.items():
        assert (first[name] - grad).abs().max() <= 1e-13 * scale, name
    for found, _ in results:
        assert all((ours - alone).abs().max() <= 1e-12 for ours, alone in zip(found, embeddings, strict=True))


@pytest.mark.parametrize(
    ("size", "n", "tail", "global_pool"), every_pair([1, 2, 3], [40, 45, 2], ["exact", "zeros"], [False, True])
)
def test_every_rank_has_the_embedding_and_gradients_of_one_process(size, n, tail, global_pool):
    check(size, small(tail=tail, global_pool=global_pool), *slide(n))


def test_gradients_through_all_layers_with_activation_checkpointing():
    model = small()
    model.activation_checkpointing = True
    check(3, model, *slide(45), all_layer_embed=True)


def test_a_mask_leaves_tiles_out():
    check(2, small(), *slide(30), torch.arange(30)[None] % 4 == 1)


@pytest.mark.parametrize("name", ["cls_token", "norm.bias", "patch_embed.proj.weight", "encoder.layers.1.ffn.fc1.weight"])
def test_gradients_where_one_parameter_alone_is_trained(name):
    def freeze(model, rank):
        for one, weight in model.named_parameters():
            weight.requires_grad_(one == name)

    check(2, small(), *slide(30), change=freeze)


def test_ranks_leave_out_the_same_layers_in_training():
    """If each rank drew for itself, nine of ten runs would differ."""
    model, (tiles, coords) = small(dropout=0.0, drop_path=0.5, depth=3, global_pool=True), slide(30)
    model.train()
    with torch.no_grad():
        possible = [model(tiles, coords)[0] for _ in range(200)]
    for _ in range(4):
        found, _ = on_ranks(2, model, lambda mine, comm: mine(tiles, coords)[0])
        assert min((found - one).abs().max() for one in possible) <= 1e-12


def refusal(call):
    with pytest.raises(ValueError, match=r".") as caught, torch.no_grad():
        call()
    return str(caught.value)


TILES, COORDS = slide(30)
REFUSED = {
    "several slides": (lambda mine, rank: mine(TILES.repeat(2, 1, 1), COORDS.repeat(2, 1, 1)), "tiles has 2 slides"),
    "a tile of the last rank": (
        lambda mine, rank: mine(TILES, COORDS + 6000 * (torch.arange(30) == 29)[None, :, None]),
        "tile 29 of 30",
    ),
    "what one rank refuses": (lambda mine, rank: mine(TILES, COORDS + 9000 * rank), "outside the grid"),
    "a map": (lambda mine, rank: attention_map(mine, TILES, COORDS), "model is over ranks"),
    "its rows alone": (
        lambda mine, rank: mine(*(x.chunk(2, 1)[rank] for x in (TILES, COORDS))),
        "arguments of SlideEncoder.*coords",
    ),
}
DIFFER = {
    "weights": (lambda mine, rank: mine.cls_token.data.add_(rank), "cls_token"),
    "pooling": (lambda mine, rank: setattr(mine, "global_pool", rank == 0), "config"),
    "training": (lambda mine, rank: mine.train(rank == 0), "training"),
}
"""Each rank would compute its rows with weights of its own, or pool another thing."""


@pytest.mark.parametrize("case", [*REFUSED, *DIFFER])
def test_what_is_refused_is_refused_on_every_rank(case):
    call, text = REFUSED.get(case, (lambda mine, rank: mine(TILES, COORDS), ""))
    change, text = DIFFER.get(case, (lambda mine, rank: None, text))
    answers = on_ranks(2, small(dropout=0.25), lambda mine, comm: refusal(lambda: call(mine, comm.rank)), change)
    assert all(re.search(text, answer) for answer in answers), answers


def test_what_is_no_transport_is_named():
    with pytest.raises(TypeError, match="comm=3 is a int"):
        SlideEncoder(small().config, comm=3)
