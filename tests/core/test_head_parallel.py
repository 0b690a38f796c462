"""Modules with their heads over ranks, as torch's tensor parallelism divides them."""

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from helpers import launch
from helpers.project import ROOT
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dilkit import (
    Alibi,
    BlockSparse,
    DilatedAttention,
    DilatedCache,
    MultiheadDilatedAttention,
    Pattern,
    PatternError,
    RelativeTable,
    SlidingWindow,
    dilated_attention,
    order,
)
from dilkit.comm import RingDilatedAttention, TorchComm, shard, sum_over_ranks
from dilkit.nn import HeadParallel
from dilkit.nn.multihead import APART, lay_out

BATCH, SEQ, EMBED, HEADS = 2, 40, 32, 8
LAYOUTS = torch.rand(HEADS, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.6
SEGMENTS = [8, 16, 64], [1, 2, 4]
MODULO, BLOCK, ZEROS = Pattern(*SEGMENTS), Pattern(*SEGMENTS, "block"), Pattern(*SEGMENTS, tail="zeros")
RANGES = Pattern(*SEGMENTS, heads=[(0, 3), None, (1, 7)])
BLOCKS = Pattern.of(BlockSparse(LAYOUTS, 8), SlidingWindow(5, heads=(1, 6)))
FEW = Pattern(*SEGMENTS, heads=[(0, 2), (0, 1), (0, 2)])  # heads of later ranks see nothing
WINDOW = Pattern.of(SlidingWindow(9))
ORDERS = [order((5, 8)), order((5, 8), "snake"), order((5, 8), "morton")]

LAYERS = {
    "modulo": (DilatedAttention(MODULO), dict(rotary=True, is_causal=True)),
    "block, grouped": (DilatedAttention(BLOCK), dict(num_kv_heads=4, sink=True)),
    "ranges": (DilatedAttention(RANGES), dict(layer_norm=True, bias=False)),
    "blocks by head": (DilatedAttention(BLOCKS), dict(kdim=24, vdim=20, layer_norm=True)),
    "nothing seen": (DilatedAttention(FEW), dict(sink=True, num_kv_heads=4)),
    "dropout": (DilatedAttention(MODULO), dict(dropout=0.3, num_kv_heads=4)),
    "dropout, alike": (DilatedAttention(WINDOW), dict(dropout=0.3)),
    "orders, alike": (DilatedAttention(WINDOW, orders=ORDERS), {}),
    "tails": (DilatedAttention(ZEROS), {}),
}
BARE = {
    "modulo": (MODULO, HEADS, {}),
    "block, grouped": (BLOCK, 4, dict(is_causal=True)),
    "ranges": (RANGES, 4, {}),
    "blocks by head": (BLOCKS, HEADS, {}),
    "dropout, alike": (WINDOW, 4, dict(dropout_p=0.3)),
    "alike": (WINDOW, HEADS, {}),
}
HALVES = "block, grouped", "blocks by head", "modulo"
"""Cases that two ranks try in bfloat16; more ranks try all."""
PLAN = dict(q=ColwiseParallel(), k=ColwiseParallel(), v=ColwiseParallel(), inner=HeadParallel(), out=RowwiseParallel())


class Bare(nn.Module):
    def __init__(self, inner, kv_heads, options):
        super().__init__()
        width = kv_heads * EMBED // HEADS
        self.q, self.v, self.out = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, width), nn.Linear(EMBED, EMBED)
        self.k = nn.Linear(EMBED, width, bias=False)  # a bias would get a gradient of nothing but rounding
        self.inner, self.options = inner, options

    def forward(self, x):
        rows = (project(x).unflatten(-1, (-1, EMBED // HEADS)) for project in (self.q, self.k, self.v))
        attended = self.inner(*rows, **self.options)
        return self.out(attended.flatten(-2))


class Layer(nn.Module):
    def __init__(self, inner, **options):
        super().__init__()
        self.attn = MultiheadDilatedAttention(EMBED, HEADS, inner, **options)

    def forward(self, *x):
        return self.attn(*x)[0]


def whole(tensors):
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def drawn(make, dtype=torch.float32):
    torch.manual_seed(0)
    made = make()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.to(dtype)


def close(found, expected, what):
    """Compare by the norm: sums that cancel have no precision of their own."""
    limit = 1e-5 if expected.dtype == torch.float32 else 3e-2
    size, apart = (torch.linalg.vector_norm(x.detach().double()).item() for x in (expected, found - expected))
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}"
    assert apart <= limit * size, f"{what}: {apart:.3g} apart at a size of {size:.3g}"


def trained(model, inputs):
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1.0)  # a small one makes steps of gradients that are rounding
    first = None
    for step in range(2):
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(step)  # of dropped weights
        out = model(*leaves)
        optimizer.zero_grad()
        (out * torch.rand(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)).sum().backward()
        first = first or ([out.detach(), *(x.grad for x in leaves)], gradients(model))
        optimizer.step()
    return first


def gradients(model):
    found = whole({name: p.grad for name, p in model.named_parameters()})
    if "attn.k_proj_weight" in found and found["attn.k_proj_weight"].shape[1] == EMBED:
        lay_out(found, "attn.", True, ())
    return found


def close_gradients(mine, theirs, what):
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        close(mine[name], gradient, f"{what}: gradient of {name}")


def same(what, make, plan, mesh, dtype):
    alone, split = drawn(make, dtype), parallelize_module(drawn(make, dtype), mesh, plan)
    layer = alone.attn if isinstance(alone, Layer) else None
    widths = [EMBED] if layer is None or layer.kdim == EMBED else [EMBED, layer.kdim, layer.vdim]
    inputs = [torch.randn(BATCH, SEQ, width, dtype=dtype) for width in widths]
    (expected, theirs), (found, mine) = trained(alone, inputs), trained(split, inputs)
    for x, y in zip(found, expected, strict=True):
        close(x, y, what)
    close_gradients(mine, theirs, what)
    again = make().to(dtype)
    again.load_state_dict(whole(split.state_dict()))
    for name, x in alone.state_dict().items():
        close(again.state_dict()[name], x, f"{what}: {name} after two steps")
    return split


def all_cases(mesh, ranks):
    """Hold every layer and bare attention to one rank: two ranks in float32, and some in bfloat16; four in both."""
    for dtype in (torch.float32, torch.bfloat16):
        chosen = HALVES if ranks == 2 and dtype == torch.bfloat16 else {**LAYERS, **BARE}.keys()
        for what, (inner, options) in LAYERS.items():
            if what in chosen:
                same(f"layer, {what}", lambda i=inner, o=options: Layer(i, **o), {"attn": HeadParallel()}, mesh, dtype)
            assert inner.pattern.head_shard is None, "other layers may have it"
        for what, (pattern, kv_heads, options) in BARE.items():
            if what in chosen:
                make = lambda p=pattern, k=kv_heads, o=options: Bare(DilatedAttention(p), k, o)  # noqa: E731
                split = same(f"bare, {what}", make, PLAN, mesh, dtype)
                assert (split.inner.pattern.head_shard is None) == (what == "alike")


X = torch.randn(2, SEQ, EMBED, generator=torch.Generator().manual_seed(5))
GROUPED = dict(num_kv_heads=4, rotary=True, is_causal=True, sink=True, layer_norm=True)


def pair(mesh, pattern=RANGES, **options):
    alone, split = (drawn(lambda: Layer(DilatedAttention(pattern), **options)).attn for _ in range(2))
    return alone, parallelize_module(split, mesh, HeadParallel())


def calls(mesh):
    alone, split = pair(mesh, **GROUPED)
    starts, ignored = torch.tensor([0, 13, SEQ], dtype=torch.int32), torch.zeros(2, SEQ, dtype=torch.bool)
    ignored[1, 30:] = True
    for options in (dict(cu_seqlens=starts), {}):
        close(split(X[0], **options)[0], alone(X[0], **options)[0], f"rows alone, {options}")
    close(split(X, key_padding_mask=ignored)[0], alone(X, key_padding_mask=ignored)[0], "masked")
    nested = torch.nested.nested_tensor([X[0, :13], X[1, :30]], layout=torch.jagged)
    close(split(nested)[0].values(), alone(nested)[0].values(), "nested")
    close(copy.deepcopy(split)(X)[0], alone(X)[0], "a copy")
    with torch.autocast("cpu", torch.bfloat16):
        close(split(X)[0], alone(X)[0], "autocast")
    of_rank, leaf = (x.clone().requires_grad_() for x in (X.chunk(mesh.size(), 1)[mesh.get_local_rank()], X))
    out = split(DTensor.from_local(of_rank, mesh, [Shard(1)]))[0]
    (expected,) = torch.autograd.grad(alone(leaf)[0].square().sum(), leaf)
    close(torch.autograd.grad(out.square().sum(), of_rank)[0], expected.chunk(mesh.size(), 1)[mesh.get_local_rank()], "a DTensor")
    with torch.no_grad():
        cache = DilatedCache(split.attention.pattern, split.num_kv_heads // mesh.size())
        steps = [split(X[:, i:j], cache=cache)[0] for i, j in ((0, 30), (30, 31), (31, SEQ))]
        close(torch.cat(steps, 1), alone(X)[0], "from a cache")


def biases(mesh):
    slopes = torch.randn(HEADS, generator=torch.Generator().manual_seed(6))

    def layer():
        inner = DilatedAttention(MODULO, bias=RelativeTable(nn.Parameter(torch.zeros(HEADS, 9))), softcap=2.0)
        return drawn(lambda: Layer(inner)).attn

    alone, split = layer(), parallelize_module(layer(), mesh, HeadParallel())
    gradients = []
    for one in (alone, split):
        given = slopes.clone().requires_grad_()
        outs = one(X)[0], one(X, score_bias=Alibi(given))[0]
        sum(out.square().sum() for out in outs).backward()
        weights = one.attention.bias_weights.grad
        gradients.append([*outs, given.grad, weights if one is alone else weights.full_tensor()])
    for got, expected in zip(*gradients[::-1], strict=True):
        close(got, expected, "a bias and its gradient")
    saved = split.state_dict()["attention.bias_weights"].full_tensor()
    close(saved, alone.state_dict()["attention.bias_weights"], "the state dict of a bias")


def shared(mesh):
    """Layers with a shared bias and projections still share them; an optimizer makes one step of each."""
    bias = RelativeTable(nn.Parameter(torch.zeros(HEADS, 9)))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (MultiheadDilatedAttention(EMBED, HEADS, DilatedAttention(MODULO, bias=bias)) for _ in range(2))
            self.two.in_proj_weight, self.two.in_proj_bias = self.one.in_proj_weight, self.one.in_proj_bias

        def forward(self, x):
            return self.two(x + self.one(x)[0])[0]

    alone = drawn(Two)
    split = parallelize_module(copy.deepcopy(alone), mesh, {"one": HeadParallel(), "two": HeadParallel()})
    assert split.one.attention.bias_weights is split.two.attention.bias_weights
    (expected, _), (found, _) = (trained(model, [X]) for model in (alone, split))
    close(found[0], expected[0], "layers that share weights")
    steps = [whole(dict(model.named_parameters())) for model in (split, alone)]
    close(*(named["one.attention.bias_weights"] for named in steps), "a shared bias after two steps")
    packed = torch.cat([steps[0][f"one.{name}"] for name in APART])
    close(packed, steps[1]["one.in_proj_weight"], "shared projections after two steps")


def dropout_from_now_on(mesh):
    """A layer that drops no weights when its heads are divided, and does later on."""
    outs = []
    for one in pair(mesh, WINDOW):
        one.dropout = 0.3
        torch.manual_seed(4)
        outs.append(one(X)[0])
    close(outs[1], outs[0], "dropout from now on")


def states(mesh, folder):
    alone, split = pair(mesh, BLOCK, layer_norm=True)
    full = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True))
    again = MultiheadDilatedAttention(EMBED, HEADS, DilatedAttention(BLOCK), layer_norm=True)
    again.load_state_dict(full)
    assert all(torch.equal(x, alone.state_dict()[name]) for name, x in again.state_dict().items())
    checkpoints.save(split.state_dict(), checkpoint_id=folder / "split")
    checkpoints.save(alone.state_dict(), checkpoint_id=folder / "alone")
    for way in ("one rank's", "all ranks'", "a checkpoint"):
        torch.manual_seed(9)
        other = Layer(DilatedAttention(BLOCK), layer_norm=True).attn
        assert parallelize_module(other, mesh, HeadParallel()) is other
        if way == "one rank's":
            other.load_state_dict(alone.state_dict())
        elif way == "all ranks'":
            set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
        else:
            state = other.state_dict()
            with pytest.raises(checkpoints.api.CheckpointException, match="Missing key in checkpoint state_dict: k_proj_weight"):
                checkpoints.load(other.state_dict(), checkpoint_id=folder / "alone")
            checkpoints.load(state, checkpoint_id=folder / "split")
            other.load_state_dict(state)
        close(other(X)[0], alone(X)[0], way)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "in_proj_weight"'):
        set_model_state_dict(other, dict(alone.state_dict()), options=StateDictOptions(full_state_dict=True))


def refusals(mesh):
    def refused(module, match, error=ValueError, onto=mesh):
        with pytest.raises(error, match=match):
            parallelize_module(module, onto, HeadParallel())

    part = DilatedAttention(Pattern([8], [2], head_shard=(1, 9)))
    refused(MultiheadDilatedAttention(24, 3, DilatedAttention(MODULO)), "num_kv_heads=3 of 3 heads .* the [24] ranks of the mesh")
    for module in (part, MultiheadDilatedAttention(32, 8, part)):
        refused(module, r"has head_shard=\(1, 9\), .*without head_shard")
    for module in (nn.MultiheadAttention(8, 2), MultiheadDilatedAttention(32, 8, nn.Identity())):
        refused(module, "holds no dilkit.Pattern as its `pattern`; a MultiheadDilatedAttention, ", TypeError)
    for name, child in (("out_proj", nn.Sequential(nn.Linear(32, 32))), ("inner_norm", nn.RMSNorm(32))):
        layer = MultiheadDilatedAttention(32, 8, DilatedAttention(MODULO), layer_norm=True)
        setattr(layer, name, child)
        refused(layer, f"{name} is a .*divide the layer first, and change it then")
    layer = MultiheadDilatedAttention(32, 8, DilatedAttention(MODULO))
    nn.utils.parametrize.register_parametrization(layer, "in_proj_bias", nn.Tanh())
    refused(layer, "in_proj_bias is no parameter of the layer")
    served = DilatedAttention(Pattern([8], [2], heads=[(0, 9)]))
    refused(MultiheadDilatedAttention(32, 8, served), "past the 8 heads", PatternError)
    flat = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    refused(DilatedAttention(MODULO), r"device_mesh has 2 dimensions, of shape \(1, [24]\).*device_mesh\[\"tp\"\]", onto=flat)
    layer, inner = pair(mesh)[1], DilatedAttention(MODULO)
    for module in (layer, inner, layer, inner):
        assert parallelize_module(module, mesh, HeadParallel()) is module
    assert len(inner._forward_pre_hooks) == 1
    for module in (layer, inner):
        refused(module, "already; they cannot go over", onto=flat["dp"])
    rows = torch.zeros(1, 8, HEADS, 4)
    parallelize_module(served, mesh, HeadParallel())
    for _ in range(2):  # what failed once is not taken for done
        with pytest.raises(PatternError, match="past the 8 heads"):
            served(*[rows[:, :, : HEADS // mesh.size()]] * 3)
    given = DTensor.from_local(rows, mesh, [Shard(2)])
    for attend in (inner, lambda *x: dilated_attention(*x, MODULO)):
        with pytest.raises(TypeError, match=r"^query is a DTensor of shape .*query\.to_local\(\).*dilkit\.nn\.HeadParallel"):
            attend(given, given, given)
    ignored = DTensor.from_local(torch.zeros(1, 8, dtype=torch.bool), mesh, [Replicate()])
    for name, x in (("sink", pair(mesh, sink=True)[1].sinks), ("key_padding_mask", ignored)):
        with pytest.raises(TypeError, match=f"^{name} is a DTensor"):
            dilated_attention(rows, rows, rows, MODULO, **{name: x})
    learned = DilatedAttention(MODULO, bias=Alibi(nn.Parameter(torch.ones(HEADS))))
    with pytest.raises(ValueError, match="has a bias that is learned"):
        parallelize_module(learned, mesh, HeadParallel())
    with pytest.raises(ValueError, match="its heads over ranks"):
        pair(mesh, BLOCK)[1].to_torchscale_state_dict()


def compiled(mesh):
    alone, split = (drawn(lambda: Layer(DilatedAttention(RANGES), **GROUPED)) for _ in range(2))
    parallelize_module(split, mesh, {"attn": HeadParallel()})
    split.compile(backend="aot_eager", fullgraph=True)
    (expected, theirs), (found, mine) = trained(alone, [X]), trained(split, [X])
    for x, y in zip(found, expected, strict=True):
        close(x, y, "compiled")
    close_gradients(mine, theirs, "compiled")
    alone, split = (drawn(lambda: Bare(DilatedAttention(RANGES), 4, {})) for _ in range(2))
    parallelize_module(split, mesh, PLAN)
    close(split(X), alone(X), "called first")
    split.compile(backend="aot_eager", fullgraph=True)
    close(split(X), alone(X), "compiled then")


def two_dimensions():
    """Heads over two ranks, and over two others the rows of sequences, or sequences under FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tp"))
    rank, comm = mesh["other"].get_local_rank(), TorchComm(mesh["other"].get_group())
    models = [
        (lambda inner: Layer(inner, **GROUPED), {"attn": HeadParallel()}),
        (lambda inner: Bare(inner, 4, {}), PLAN),
    ]
    for model, plan in models:
        alone, fsdp = (drawn(lambda m=model: m(DilatedAttention(RANGES))) for _ in range(2))
        ring = drawn(lambda m=model: m(RingDilatedAttention(RANGES, comm)))
        parallelize_module(ring, mesh["tp"], plan)
        fully_shard(parallelize_module(fsdp, mesh["tp"], plan), mesh=mesh["other"])
        for one, rows in ((alone, X), (ring, shard(X, comm)), (fsdp, X[rank : rank + 1])):
            one(rows).square().sum().backward()
        found = gradients(ring)
        sum_over_ranks([*found.values()], comm)
        close_gradients(found, gradients(alone), "a ring")
        close_gradients({name: 2 * x for name, x in gradients(fsdp).items()}, gradients(alone), "FSDP, which averages")


def data_parallel(mesh, folder):
    """Compare DDP, and FSDP with each child by itself, with the gradients of one rank; save and load."""

    def model():
        inner = DilatedAttention(MODULO, bias=Alibi(nn.Parameter(torch.ones(HEADS))))
        return drawn(lambda: Layer(inner, rotary=True, is_causal=True))

    def sharded():
        made = model()
        for module in (made.attn.attention, made.attn.out_proj, made.attn, made):  # children first
            fully_shard(module, mesh=mesh)
        return made

    alone, ddp, fsdp = model(), DistributedDataParallel(model()), sharded()
    x = torch.randn(mesh.size(), SEQ, EMBED)
    alone(x).square().mean().backward()
    for one in (ddp, fsdp):
        one(x[mesh.get_local_rank()][None]).square().mean().backward()
    close_gradients(gradients(ddp.module), gradients(alone), "DDP")
    close_gradients(gradients(fsdp), gradients(alone), "FSDP")
    checkpoints.save(fsdp.state_dict(), checkpoint_id=folder / "fsdp")
    again = sharded()
    state = again.state_dict()
    for x in state.values():
        nn.init.zeros_(x)
    checkpoints.load(state, checkpoint_id=folder / "fsdp")
    again.load_state_dict(state)
    saved = whole(fsdp.state_dict())
    assert all(torch.equal(x, saved[name]) for name, x in whole(again.state_dict()).items())


def page():
    text = (ROOT / "docs" / "ranks.md").read_text()
    (program,) = re.findall(r'^```python title="heads.py"\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    exec(compile(program, "heads.py", "exec"), {})


def on_rank(comm, folder):
    mesh = init_device_mesh("cpu", (comm.size,), mesh_dim_names=("tp",))
    all_cases(mesh, comm.size)
    calls(mesh)
    biases(mesh)
    shared(mesh)
    dropout_from_now_on(mesh)
    states(mesh, folder)
    refusals(mesh)
    if comm.size == 2:
        page()
    else:
        compiled(mesh)
        data_parallel(mesh, folder)
        two_dimensions()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_over_ranks_are_those_of_one(ranks, tmp_path):
    launch.run("gloo", ranks, on_rank, tmp_path)
