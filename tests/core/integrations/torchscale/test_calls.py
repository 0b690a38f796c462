"""Calls of a patched class: masks, cached keys, xPos, and what is refused."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.torchscale_peer import CHECKOUTS, PUBLISHED, by_the_oracle
from torch import Tensor, nn

from dilkit.integrations.torchscale import install
from dilkit.integrations.torchscale.masks import MaskMemory
from dilkit.integrations.torchscale.proving import layer

LENGTHS, RATIOS = [8, 16, 32], [1, 2, 4]


class Turn(nn.Module):
    """Stands in for xPos: what it does to a row depends on the row's position alone."""

    def forward(self, x: Tensor, offset: int = 0, downscale: bool = False) -> Tensor:
        assert x.dim() == 3
        angle = torch.arange(offset, offset + x.shape[1], dtype=x.dtype)[:, None] / 3
        first, second = x.chunk(2, -1)
        turned = torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)
        return turned / 2 if downscale else turned


def rows(count: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, 32, dtype=torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_masks_are_applied_or_ignored(peer: type[Any], dtype: torch.dtype) -> None:
    made, x, mask = layer(peer, LENGTHS, RATIOS), rows(43), torch.zeros(2, 43, dtype=torch.bool)
    mask[0, 30:] = mask[1, :5] = True
    for way, hidden in (("apply", mask), ("ignore", None)):
        with install(mask=way):
            found, _ = made(x, x, x, key_padding_mask=mask.to(dtype))
        close(found, by_the_oracle(made, x, key_padding_mask=hidden))
    mask[1] = True
    words = "hides every key of a sequence.*True where there is padding, ~mask if yours"
    with install(), pytest.warns(UserWarning, match=words):
        made(x, x, x, key_padding_mask=mask)


class Elsewhere(torch.Tensor):
    """A mask on another device, to all appearances. `looks` counts how often somebody waited for its values."""

    looks = 0
    device = torch.device("xpu")

    def any(self) -> Any:
        Elsewhere.looks += 1
        return self.as_subclass(torch.Tensor).any()


def test_a_mask_is_looked_at_once_where_that_takes_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elsewhere, "looks", 0)
    memory, mask = MaskMemory(), torch.zeros(2, 43, dtype=torch.bool).as_subclass(Elsewhere)
    assert [memory.hides(mask) for _ in range(12)] == [False] * 12
    assert Elsewhere.looks == 1
    mask[1, 3] = True
    assert [memory.hides(mask) for _ in range(12)] == [True] * 12
    assert Elsewhere.looks == 2
    here = torch.zeros(2, 43, dtype=torch.bool)
    assert memory.hides(here.as_subclass(Elsewhere)) is False
    assert Elsewhere.looks == 3
    with torch.inference_mode():  # one that cannot be remembered counts
        assert MaskMemory().hides(torch.zeros(2, 43, dtype=torch.bool).as_subclass(Elsewhere)) is True
    assert Elsewhere.looks == 3
    assert memory.hides(here) is False
    here.numpy()[0, 0] = True  # which torch does not notice
    assert memory.hides(here) is True


@pytest.mark.parametrize("xpos", [None, Turn()], ids=["", "xpos"])
@pytest.mark.parametrize("tail", ["zeros", "exact"])
def test_decoding_is_the_whole_row_by_row(peer: type[Any], xpos: Any, tail: str) -> None:
    """A prompt of 11 rows, then one row, two, and one at a time over the ends of segments."""
    made, x, state = layer(peer, LENGTHS, RATIOS), rows(43), {}
    made.xpos = xpos
    whole = by_the_oracle(made, x, is_causal=True)
    with install(tail=tail):
        close(made(x, x, x, is_causal=True)[0], whole)
        cuts = [0, 11, 12, *range(14, 44)]
        for start, stop in pairwise(cuts):
            part = x[:, start:stop]
            found, _ = made(part, part, part, state, is_first_step=start == 0, is_causal=True)
            close(found, whole[:, start:stop])
    assert {name: tuple(kept.shape) for name, kept in state.items()} == {"prev_key": (2, 4, 43, 8), "prev_value": (2, 4, 43, 8)}
    assert all(kept.is_contiguous() for kept in state.values()), "torchscale takes views of it"
    close(state["prev_key"].transpose(1, 2).flatten(2), made.k_proj(x))


def test_decoding_with_a_mask_of_all_keys(peer: type[Any]) -> None:
    """A mask of the new rows alone does not say which of the older keys are padding: it is refused."""
    made, x, state, mask = layer(peer, LENGTHS, RATIOS), rows(43), {}, torch.zeros(2, 43, dtype=torch.bool)
    mask[1, :9] = True
    whole = by_the_oracle(made, x, is_causal=True, key_padding_mask=mask)
    with install():
        for start, stop in ((0, 30), (30, 43)):
            part = x[:, start:stop]
            found, _ = made(part, part, part, state, key_padding_mask=mask[:, :stop], is_causal=True)
            close(found, whole[:, start:stop])
        with pytest.raises(ValueError, match=r"key_padding_mask has shape \(2, 1\)"):
            made(x[:, :1], x[:, :1], x[:, :1], state, key_padding_mask=mask[:, :1], is_causal=True)


def test_a_state_of_other_sequences_is_refused(peer: type[Any]) -> None:
    """A view of it would give rows of four sequences to two."""
    made, x, state = layer(peer, LENGTHS, RATIOS), rows(11, batch=4), {}
    with install():
        made(x, x, x, state, is_first_step=True, is_causal=True)
        with pytest.raises(ValueError, match=r"\['prev_key'\] has shape \(4, 4, 11, 8\); .* = \(2, 4, rows, 8\)"):
            made(x[:2, :1], x[:2, :1], x[:2, :1], state, is_causal=True)
        with pytest.raises(ValueError, match=r"is_first_step is given with an incremental_state that holds .*\(4, 4, 11, 8\)"):
            made(x, x, x, state, is_first_step=True, is_causal=True)
    assert tuple(state["prev_key"].shape) == (4, 4, 11, 8)


def test_a_subclass_with_a_procedure_of_its_own_is_refused(peer: type[Any]) -> None:
    x = rows(16)
    other = type("Other", (peer,), {"gathering": lambda self: None})
    same = type("Same", (peer,), {"note": 3})
    with install():
        assert layer(same, LENGTHS, RATIOS)(x, x, x)[0].shape == x.shape
        with pytest.raises(TypeError, match="Other has its own gathering, which dilkit does not call; give it its own forward"):
            layer(other, LENGTHS, RATIOS)(x, x, x)


@pytest.mark.parametrize("peer", CHECKOUTS, indirect=True)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("option", ["xpos_rel_pos", "multiway"])
def test_what_else_torchscale_can_do(peer: type[Any], option: str, is_causal: bool) -> None:
    made, x = layer(peer, LENGTHS, RATIOS, **{option: True}), rows(43)
    for part in made.modules():
        if hasattr(part, "split_position"):
            part.split_position = 20
    own, _ = made(x, x, x, is_causal=is_causal)
    with install():
        close(made(x, x, x, is_causal=is_causal)[0], own)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, [8, 18, 32]], ids=["", "with a warning"])
@pytest.mark.filterwarnings("ignore:segment_length=18")
def test_it_compiles_as_one_graph(peer: type[Any], lengths: list[int]) -> None:
    made, x, mask = layer(peer, lengths, RATIOS), rows(43), torch.zeros(2, 43, dtype=torch.bool)
    mask[0, 3] = True
    with install():
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        for hidden in (None, mask):
            close(compiled(x, x, x, key_padding_mask=hidden)[0], made(x, x, x, key_padding_mask=hidden)[0])


def test_autocast(peer: type[Any]) -> None:
    made, x = layer(peer, LENGTHS, RATIOS).float(), rows(43).float()
    with install(), torch.autocast("cpu", torch.bfloat16):
        found, _ = made(x, x, x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), by_the_oracle(made.double(), x.double()), rtol=0.05, atol=0.1)


X, SIZES = rows(43), (LENGTHS, RATIOS)
REFUSED: dict[str, tuple[tuple[Any, Any], dict[str, Any], str]] = {
    "attn_mask": (SIZES, dict(attn_mask=torch.zeros(43, 43)), "attn_mask is given, but what sees what is for the segments"),
    "rel_pos": (SIZES, dict(rel_pos=torch.zeros(8, 43, 43)), r"rel_pos is given, a tensor \(8, 43, 43\).*args.rel_pos_buckets=0"),
    "mask": (SIZES, dict(key_padding_mask=torch.ones(2, 42, dtype=torch.bool)), r"key_padding_mask has shape \(2, 42\)"),
    "keys": (SIZES, dict(key=X[:, :42], value=X[:, :42]), "query has 43 rows, key 42 and value 42"),
    "values": (SIZES, dict(value=X[:, :42]), "query has 43 rows, key 43 and value 42"),
    "more keys": (SIZES, dict(key=rows(44), value=rows(44)), "query has 43 rows, key 44 and value 44"),
    "no lengths": ((None, [1]), {}, "args.segment_length=None of DilatedAttention is no list"),
    "a text": (([8], "[1]"), {}, r"args.dilated_ratio='\[1\]' of DilatedAttention is no list"),
    "an empty list": (([], [1]), {}, r"args.segment_length=\[\]"),
    "a large ratio": (([8], [16]), {}, r"dilation_rates\[0\]=16 exceeds segment_lengths\[0\]=8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(peer: type[Any], case: str) -> None:
    sizes, options, text = REFUSED[case]
    with install(), pytest.raises(ValueError, match=text):
        layer(peer, *sizes)(**dict(query=X, key=X, value=X) | options)


def test_dropout_is_refused_in_training_alone(peer: type[Any]) -> None:
    made = layer(peer, LENGTHS, RATIOS, dropout=0.1)
    with install():
        with pytest.raises(ValueError, match=r"attention dropout is 0.1: torchscale drops weights of each branch"):
            made(X, X, X)
        close(made.eval()(X, X, X)[0], by_the_oracle(made, X))


@pytest.mark.parametrize(
    ("xpos", "state", "text"), [(None, {}, "incremental_state is"), (Turn(), None, "xPos is"), (Turn(), {}, "state and xPos is")]
)
def test_what_ranks_cannot_do_is_refused(
    peer: type[Any], monkeypatch: pytest.MonkeyPatch, xpos: Any, state: Any, text: str
) -> None:
    utils = ModuleType("utils")
    utils.get_data_parallel_group = lambda: "some ranks"
    monkeypatch.setitem(sys.modules, PUBLISHED.replace("dilated_attention", "utils"), utils)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    made, x = layer(peer, LENGTHS, RATIOS, seq_parallel=True), rows(16)
    made.xpos = xpos
    with install(), pytest.raises(ValueError, match=f"{text} given with seq_parallel: run it on one rank"):
        made(x, x, x, state)
