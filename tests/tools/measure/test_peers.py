"""The peers of `dilkit bench`: each computes what it says it computes, is refused or absent with a reason, and is marked.

Packages that are not here are stood in for by modules that compute the same in another way.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dilkit import Pattern, Problem
from dilkit.oracle import oracle_attention
from dilkit.tools.commands import bench
from dilkit.tools.measure import correctness
from dilkit.tools.measure.case import CaseRunner
from dilkit.tools.measure.implementation import Implementation, Inputs
from dilkit.tools.measure.peers import flex as peer_flex
from dilkit.tools.measure.peers import functions as peer_functions
from dilkit.tools.measure.peers import known as peers
from dilkit.tools.site import pages as docs

PATTERN = Pattern([16, 32], [1, 4])
SMALL = Problem(pattern=PATTERN, seq=64, heads=4, head_dim=8, batch=2, dtype="float64", requires_grad=True)
pytestmark = pytest.mark.usefixtures("tiny_yardsticks")
RAGGED = replace(SMALL, seq=59, pattern=Pattern([16, 30], [1, 4]))


def assert_computes_what_it_says(peer: Implementation, problem: Problem) -> None:
    assert peer.refusals(problem) == ()
    findings = correctness.check(peer, problem, Inputs.random(problem))
    assert {f.what for f in findings} >= {"out", "dquery", "dkey", "dvalue", "out rows"}
    assert [f for f in findings if not f.passed] == []


# LongNet's procedure


@pytest.mark.parametrize("offset", ["modulo", "block"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_longnet_computes_what_it_says(offset, is_causal, ragged) -> None:
    problem = RAGGED if ragged else SMALL
    lengths, rates = problem.pattern.segment_lengths, problem.pattern.dilation_rates
    problem = replace(problem, pattern=Pattern(lengths, rates, offset), is_causal=is_causal)
    assert_computes_what_it_says(peers.known()["longnet"], problem)


@pytest.mark.parametrize(
    ("problem", "differing"),
    [
        (replace(SMALL, requires_grad=False), ()),
        (SMALL, ("dquery",)),
        (RAGGED, ("out", "dquery")),
        (replace(RAGGED, is_causal=True), ("dquery",)),
    ],
    ids=["forward", "gradients", "filled up", "filled up causal"],
)
def test_longnet_differs_where_it_was_published_so(problem, differing) -> None:
    peer = peers.known()["longnet"]
    assert peer.differs(problem) == bool(differing)
    found = correctness.difference(peer, problem, Inputs.random(problem))
    assert {name for name in ("out", "dquery") if found and (getattr(found, f"{name}_relative") or 0.0) > 1e-3} == set(differing)


def test_zeros_that_a_segment_is_filled_up_with_are_keys_of_score_0() -> None:
    problem = replace(RAGGED, pattern=Pattern([16], [1]), requires_grad=False)
    inputs = Inputs.random(problem)
    longer = [torch.cat([x.detach(), x.new_zeros(2, 5, 4, 8)], 1) for x in (inputs.query, inputs.key, inputs.value)]
    expected, _ = oracle_attention(*longer, problem.pattern)
    function = peer_functions.longnet(problem)
    assert function is not None
    found = function.rows(inputs, problem, torch.arange(59), "float64")
    torch.testing.assert_close(found, expected[:, :59])


# Packages


def stand_in(monkeypatch, name: str, **contents: Any) -> None:
    """A module of this name, with its parents, until the test ends."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules[name]).update(contents)


class TorchscaleModule(torch.nn.Module):
    """torchscale's module, by the oracle of one branch after the other."""

    def __init__(self, args: SimpleNamespace, embed_dim: int, heads: int, self_attention: bool) -> None:
        super().__init__()
        assert args.flash_attention
        assert self_attention
        self.args, self.heads = args, heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, torch.nn.Linear(embed_dim, embed_dim))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> tuple[Any, None]:
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1))
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        pairs = list(zip(self.args.segment_length, self.args.dilated_ratio, strict=True))
        parts = [oracle_attention(q, k, v, Pattern([w], [r], "block"), is_causal=is_causal) for w, r in pairs]
        weights = torch.stack([lse for _, lse in parts]).detach().softmax(0).transpose(-1, -2).unsqueeze(-1)
        return self.out_proj((weights * torch.stack([out for out, _ in parts])).sum(0).flatten(2)), None


class HeadSplitModule:
    """The module of dilated-attention-pytorch, head by head and segment by segment."""

    def __init__(self, segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...]) -> None:
        self.branches = list(zip(segment_lengths, dilation_rates, strict=True))

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
        heads, columns = query.shape[2], []
        for head in range(heads):
            branch = head * len(self.branches) // heads
            length, rate = self.branches[branch]
            rows = [torch.arange(s + branch % rate, s + length, rate) for s in range(0, query.shape[1], length)]
            outs = [self.attend(*(x[:, r, head] for x in (query, key, value)), is_causal) for r in rows]
            total = torch.stack([out.sum(1, keepdim=True) for out in outs]).sum(0)
            column = torch.zeros_like(query[:, :, head])
            for r, out in zip(rows, outs, strict=True):
                column = column.index_add(1, r, out / total / len(self.branches))
            columns.append(column)
        return torch.stack(columns, 2)

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def na1d(query: Any, key: Any, value: Any, kernel_size: int, dilation: int, is_causal: bool, scale: float) -> torch.Tensor:
    """Neighbourhood attention, query by query, by its definition."""
    rows = []
    for i in range(query.shape[1]):
        residue = list(range(i % dilation, query.shape[1], dilation))
        place = residue.index(i)
        first = place - kernel_size + 1 if is_causal else min(max(place - kernel_size // 2, 0), len(residue) - kernel_size)
        seen = [residue[p] for p in range(max(first, 0), first + kernel_size)]
        scores = scale * torch.einsum("bhd,bnhd->bhn", query[:, i], key[:, seen])
        rows.append(torch.einsum("bhn,bnhd->bhd", scores.softmax(-1), value[:, seen]))
    return torch.stack(rows, 1)


@pytest.fixture
def packages(monkeypatch) -> None:
    """All packages, stood in for."""
    stand_in(monkeypatch, "torchscale.component.dilated_attention", DilatedAttention=TorchscaleModule)
    stand_in(monkeypatch, "dilated_attention_pytorch.dilated_attention", DilatedAttention=HeadSplitModule)
    stand_in(monkeypatch, "natten.functional", na1d=na1d)
    component = sys.modules["torchscale.component"]
    multihead = ModuleType("torchscale.component.multihead_attention")
    multihead.flash_attn_func = oracle_attention
    monkeypatch.setitem(sys.modules, multihead.__name__, multihead)
    component.multihead_attention = multihead


@pytest.mark.parametrize("name", ["torchscale", "dilated-attention-pytorch", "natten"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packages_compute_what_they_say(packages, name, is_causal) -> None:
    peer = peers.known()[name]
    assert peer.absent() is None
    assert peer.differs(SMALL)
    assert_computes_what_it_says(peer, replace(SMALL, is_causal=is_causal))


@pytest.mark.parametrize("name", ["torchscale", "dilated-attention-pytorch", "natten"])
@pytest.mark.parametrize("seq", [64, 256])
def test_a_package_that_computes_something_else_is_wrong(packages, monkeypatch, name, seq) -> None:
    peer, problem = peers.known()[name], replace(SMALL, seq=seq, requires_grad=False)
    other = replace(peer, attend=lambda inputs, problem: 1.001 * peer.attend(inputs, problem))
    findings = correctness.check(other, problem, Inputs.random(problem))
    assert [f.what for f in findings if not f.passed] == ["out", "out rows"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("longnet", dict(kv_heads=2), "grouped heads"),
        ("longnet", dict(pattern=Pattern([16], [1], overlap="once")), "overlap 'once'"),
        ("torchscale", dict(key_padding_mask=True), "key_padding_mask"),
        ("torchscale", dict(pattern=Pattern([16], [1], heads=[(0, 2)])), "head ranges"),
        ("torchscale", dict(scale=1.0), "scale 1"),
        ("torchscale", dict(pattern=Pattern([20], [3])), "dilation rate 3: must divide the segment length 20"),
        ("dilated-attention-pytorch", dict(seq=60), "seq 60: must be a multiple of segment length 16"),
        ("dilated-attention-pytorch", dict(heads=3, kv_heads=3), "heads 3: must be a multiple of the 2 branches"),
        ("natten", dict(kv_heads=1), "grouped heads"),
        ("natten", dict(pattern=Pattern([32], [32])), "a query sees 1 key"),
        ("flex", dict(), "backward: FlexAttention has none on the CPU"),
        ("flex", dict(), "dtype float64"),
    ],
)
def test_what_a_peer_cannot_do_is_refused(packages, name, change, reason) -> None:
    assert any(reason in refusal for refusal in peers.known()[name].refusals(replace(SMALL, **change)))


def test_a_package_that_cannot_compute_here_is_refused_in_its_own_words(packages, monkeypatch) -> None:
    def unable(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel for this device\nand much more")

    monkeypatch.setattr(sys.modules["natten.functional"], "na1d", unable)
    assert peers.known()["natten"].refusals(SMALL) == ("float64 on cpu: NotImplementedError: no kernel for this device",)


def test_torchscale_without_a_kernel_is_refused(packages, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["torchscale.component.multihead_attention"], "flash_attn_func", None)
    (reason,) = peers.known()["torchscale"].refusals(SMALL)
    assert "flash-attn or xformers" in reason


@pytest.mark.parametrize("name", ["torchscale", "dilated-attention-pytorch", "natten"])
def test_an_absent_package_is_listed_with_the_reason_and_the_way_out(monkeypatch, name) -> None:
    for module in ("torchscale", "dilated_attention_pytorch", "natten"):
        monkeypatch.setitem(sys.modules, module, None)
    entry = CaseRunner(peers.peer_implementations([name]), repeats=1).run(SMALL).entries[name]
    assert entry.verdict == "absent"
    assert "module" in entry.reasons[0]
    assert next(one for one in peers.describe() if one["name"] == name)["absent"] == entry.reasons[0]


@pytest.mark.skipif(importlib.util.find_spec("dilated_attention_pytorch") is None, reason="dilated-attention-pytorch is not here")
def test_the_real_package_for_split_heads(monkeypatch) -> None:
    peer = peers.known()["dilated-attention-pytorch"]
    if why := peer.absent() or "; ".join(peer.refusals(SMALL)):
        pytest.skip(why)
    assert_computes_what_it_says(peer, SMALL)


# FlexAttention


@pytest.mark.parametrize(
    "problem",
    [
        Problem(pattern=Pattern([200, 400, 700], [1, 2, 5], offset="block"), seq=700, heads=4, head_dim=8),
        Problem(pattern=Pattern([256, 300], [1, 3]), seq=650, heads=4, kv_heads=2, head_dim=8, is_causal=True),
        Problem(pattern=Pattern([512, 300], [256, 1], heads=[(0, 2), (1, 3)]), seq=600, heads=3, head_dim=8),
    ],
    ids=["block", "grouped causal", "ranges"],
)
def test_blocks_of_the_mask_are_those_of_the_count(problem) -> None:
    seen = problem.pattern.count(problem.seq, problem.heads, kv_heads=problem.kv_heads, is_causal=problem.is_causal) > 0
    missing = -problem.seq % peer_flex.BLOCK
    cells = torch.nn.functional.pad(seen, (0, missing, 0, missing))
    cells = cells.unflatten(1, (-1, peer_flex.BLOCK)).unflatten(3, (-1, peer_flex.BLOCK))
    some, whole = peer_flex._blocks(problem)
    assert torch.equal(some[0], cells.any(4).any(2))
    assert whole.any()
    assert torch.equal(whole[0] & cells.all(4).all(2), whole[0])


@pytest.mark.parametrize("problem", [SMALL, RAGGED, replace(SMALL, kv_heads=2, pattern=Pattern([16, 32], [1, 4], "block"))])
def test_the_count_of_indices_is_that_of_the_pattern(problem) -> None:
    count, n = peer_flex._counter(problem, torch.device("cpu")), torch.arange(problem.seq)
    found = count(torch.arange(problem.heads)[:, None, None], n[:, None], n)
    assert torch.equal(found, problem.pattern.count(problem.seq, problem.heads, kv_heads=problem.kv_heads))


def test_without_a_compiler_flex_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("no-such-compiler" in reason for reason in peers.known()["flex"].refusals(replace(SMALL, dtype="float32")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(is_causal=True, kv_heads=2, key_padding_mask=True, seq=300, pattern=Pattern([64, 200, 300], [1, 2, 4])),
        dict(pattern=Pattern([32], [4]), heads=2, kv_heads=2, dtype="bfloat16"),
    ],
    ids=["plain", "all at once", "rows that see nothing"],
)
@pytest.mark.filterwarnings("ignore")
def test_flex_computes_the_pattern(change, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # so that it compiles
    problem = replace(SMALL, **{**dict(dtype="float32", requires_grad=False), **change})
    peer = peers.known()["flex"]
    if why := peer.absent() or "; ".join(peer.refusals(problem)):
        pytest.skip(why)
    findings = correctness.check(peer, problem, Inputs.random(problem))
    assert [f for f in findings if not f.passed] == []


# The list, the command, the report, the page


def test_the_command_knows_the_names_without_torch() -> None:
    assert tuple(peers.known()) == bench.PEERS
    assert [peer.name for peer in peers.known().values()] == list(bench.PEERS)
    assert set(peers.NEEDS) <= set(bench.PEERS)


def test_peers_are_chosen_by_name() -> None:
    assert [p.name for p in peers.peer_implementations(["dense", "gather", "dense"])] == ["dense", "gather"]
    assert len(peers.peer_implementations()) == len(peers.peer_implementations(["gather", "all"])) == len(bench.PEERS)
    with pytest.raises(ValueError, match=r"peer 'nobody' is not known; choose from gather, .* or all"):
        peers.peer_implementations(["nobody"])


def test_who_computes_another_function_is_marked_with_its_error() -> None:
    entries = CaseRunner(peers.peer_implementations(["gather", "dense"]), repeats=1).run(SMALL).entries
    assert entries["gather"].differs is None
    found = entries["dense"].differs
    assert found is not None
    assert found.computes == "the attention of every token to every token"
    assert found.out_max_abs > 0.1
    assert found.dquery_relative > 0.1


def test_the_page_names_every_peer_and_what_it_computes(pytestconfig) -> None:
    rows = docs.peer_table(pytestconfig.rootpath).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(bench.PEERS)
    assert all(peer.computes in row for peer, row in zip(peers.known().values(), rows, strict=True))
