"""A slide over ranks: every rank returns what one computes alone."""

from __future__ import annotations

import pytest
import torch
from helpers.slide_encoder import slide, small

from dilkit.comm import run_threads, sum_over_ranks
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


def loss_of(embeddings):
    """In which every number of every embedding has a weight of its own."""
    return sum(((i + 1) * x.cos() * torch.arange(x.numel())).sum() for i, x in enumerate(embeddings))


def trained(model, comm, *call, **options):
    """The gradients of all parameters, summed over ranks."""
    model.zero_grad()
    loss_of(model(*call, **options)).backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if comm is not None:
        sum_over_ranks(found.values(), comm)
    return found


def check_gradients(size, model, *call, change=lambda mine: None, **options):
    """That each rank has the gradients of one process, of the same parameters and with the same bits."""
    change(model)
    right = trained(model, None, *call, **options)
    scale = max(grad.abs().max() for grad in right.values())

    def on_rank(comm):
        checkpointing = model.activation_checkpointing
        mine = SlideEncoder(model.config, comm=comm, dtype=torch.float64, activation_checkpointing=checkpointing)
        mine.load_state_dict(model.state_dict())
        change(mine.train(model.training))
        return trained(mine, comm, *call, **options)

    first, *others = run_threads(size, on_rank)
    assert all(torch.equal(first[name], found[name]) for found in others for name in first)
    assert list(first) == list(right)
    for name, grad in right.items():
        assert (first[name] - grad).abs().max() <= 1e-13 * scale, name


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("tail", ["exact", "zeros"])
@pytest.mark.parametrize(("size", "n"), [(1, 40), (2, 40), (3, 45), (3, 2)])
def test_gradients_are_those_of_one_process(size, n, tail, global_pool):
    check_gradients(size, small(tail=tail, global_pool=global_pool), *slide(n))


def test_gradients_through_all_layers_with_activation_checkpointing():
    model = small()
    model.activation_checkpointing = True
    check_gradients(3, model, *slide(45), all_layer_embed=True)


@pytest.mark.parametrize("name", ["cls_token", "norm.bias", "patch_embed.proj.weight", "encoder.layers.1.ffn.fc1.weight"])
def test_gradients_where_one_parameter_alone_is_trained(name):
    def freeze(model):
        for one, weight in model.named_parameters():
            weight.requires_grad_(one == name)

    check_gradients(2, small(), *slide(30), change=freeze)


def test_ranks_leave_out_the_same_layers_in_training():
    """What one process can find. If each rank drew for itself, nine of ten runs would find something else."""
    model, (tiles, coords) = small(dropout=0.0, drop_path=0.5, depth=3, global_pool=True), slide(30)
    model.train()
    with torch.no_grad():
        possible = [model(tiles, coords)[0] for _ in range(200)]
    for _ in range(4):
        found, _ = over_ranks(2, model, lambda m: m.train()(tiles, coords)[0])
        assert min((found - one).abs().max() for one in possible) <= 1e-12


def refusal(call):
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    return str(caught.value)


def test_what_is_refused_is_refused_on_every_rank():
    (tiles, coords), model = slide(30), small()
    far = coords.clone()
    far[0, 29] = 6000  # a tile of the last rank

    def work(mine):
        several = refusal(lambda: mine(tiles.repeat(2, 1, 1), coords.repeat(2, 1, 1)))
        return several, refusal(lambda: mine(tiles, far)), refusal(lambda: attention_map(mine, tiles, coords))

    for several, outside, mapped in over_ranks(2, model, work):
        assert "tiles has 2 slides" in several
        assert "tile 29 of 30" in outside
        assert "model is over ranks" in mapped


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda mine, rank: None, ""),
        (lambda mine, rank: mine.cls_token.data.add_(rank), "cls_token"),
        (lambda mine, rank: setattr(mine, "global_pool", rank == 0), "config"),
        (lambda mine, rank: mine.train(rank == 0), "training"),
    ],
)
def test_ranks_that_differ_are_refused(change, text):
    """Each would compute its rows with weights of its own, or pool another thing."""
    model, (tiles, coords) = small(dropout=0.25), slide(30)

    def on_rank(comm):
        mine = SlideEncoder(model.config, comm=comm, dtype=torch.float64).eval()
        mine.load_state_dict(model.state_dict())
        change(mine, comm.rank)
        with torch.no_grad():
            return refusal(lambda: mine(tiles, coords)) if text else str(mine(tiles, coords)[0].shape)

    assert all(text in answer for answer in run_threads(2, on_rank))


def test_a_rank_that_is_given_its_own_rows_alone_is_refused():
    """The whole slide goes to each; of halves as long as one another, each would take a part, and nobody would be told."""
    model, (tiles, coords) = small(), slide(30)

    def on_rank(comm):
        mine = SlideEncoder(model.config, comm=comm, dtype=torch.float64).eval()
        mine.load_state_dict(model.state_dict())
        return refusal(lambda: mine(*(x.chunk(2, 1)[comm.rank] for x in (tiles, coords))))

    assert all("arguments of SlideEncoder" in answer and "coords=" in answer for answer in run_threads(2, on_rank))


def test_what_one_rank_refuses_the_others_refuse():
    model, (tiles, coords) = small(), slide(30)

    def on_rank(comm):
        mine = SlideEncoder(model.config, comm=comm, dtype=torch.float64).eval()
        return refusal(lambda: mine(tiles, coords + 9000 * comm.rank))

    assert all("outside the grid" in answer for answer in run_threads(2, on_rank))


def test_what_is_no_transport_is_named():
    with pytest.raises(TypeError, match="comm=3 is a int"):
        SlideEncoder(small().config, comm=3)
