"""A decoder-only transformer over bytes with dilated attention: trained on text, saved, loaded, and sampled byte by byte."""

import argparse
import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern, Problem, files
from dilkit.comm import Comm, RingDilatedAttention
from dilkit.device import probe
from dilkit.tools.console.text import error_line, print_json
from dilkit.tools.demo.corpus import MOST_BYTES, SEPARATOR, Corpus
from dilkit.tools.demo.trainer import Task

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, which sees `context` bytes."""

    context: int = 8192
    width: int = 160
    layers: int = 3
    heads: int = 4

    @property
    def pattern(self) -> Pattern:
        """Three branches: 256 bytes whole, 1 in 4 of 1,024 bytes, 1 in 32 of the whole context."""
        return Pattern([256, 1024, max(self.context, 32)], [1, 4, 32])

    def problem(self) -> Problem:
        sizes: Any = dict(seq=self.context, heads=self.heads, head_dim=self.width // self.heads)
        return Problem(pattern=self.pattern, device=probe("cpu"), is_causal=True, requires_grad=True, **sizes)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `inner` is the attention, `options` are the module's around it."""

    def __init__(self, width: int, heads: int, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = MultiheadDilatedAttention(width, heads, inner, **options)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: DilatedCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)[0]
        out: Tensor = x + self.down(F.relu(self.up(self.mlp_norm(x))).square())
        return out


@torch.no_grad()
def scale_updates(blocks: Sequence[TransformerBlock], factor: float) -> None:
    """Scale the blocks' updates of the residual stream by `factor` over the root of the number of updates."""
    for block in blocks:
        for linear in (block.attention.out_proj, block.down):
            linear.weight.mul_(factor / math.sqrt(2 * len(blocks)))


class ByteTransformer(nn.Module):
    """Logits of the next byte, `(batch, seq, 256)`, from bytes `(batch, seq)`: this rank's part of them with `comm`."""

    def __init__(self, config: ModelConfig, comm: Comm | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        inner = DilatedAttention(config.pattern) if comm is None else RingDilatedAttention(config.pattern, comm)
        blocks = [TransformerBlock(config.width, config.heads, inner, is_causal=True, rotary=True) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)  # small beside the embedding, as are the blocks' updates
        scale_updates(blocks, 0.3)

    def caches(self) -> list[DilatedCache]:
        return [DilatedCache(self.config.pattern, self.config.heads) for _ in self.blocks]

    def forward(self, bytes_: Tensor, caches: Sequence[DilatedCache] | None = None) -> Tensor:
        x = self.embedding(bytes_.long())
        for block, cache in zip(self.blocks, caches or repeat(None, len(self.blocks)), strict=True):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


def seeded_model(config: ModelConfig, seed: int, comm: Comm | None = None) -> ByteTransformer:
    torch.manual_seed(seed)
    return ByteTransformer(config, comm)


def bits_per_byte(logits: Tensor, windows: Tensor) -> Tensor:
    """Return the mean of -log2 p(byte | the bytes before it) over `windows` `(batch, seq + 1)`, first bytes left out."""
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten().long()) / math.log(2)


class TextTask(Task):
    """The next byte of a text, in `count` windows of `context` bytes a step; in short ones for a share of the training."""

    model: Any

    def __init__(
        self, model: nn.Module, corpus: Corpus, context: int, seed: int, count: int = 1, short_share: float = 0.0
    ) -> None:
        self.model, self.corpus, self.context, self.count = model, corpus, context, count
        self.short_window, self.short_share = min(512, context), short_share
        self.held_out, self._generator = corpus.held_out_windows(context), torch.Generator().manual_seed(seed)

    def windows(self, spent: float) -> Tensor:
        seq = self.short_window if spent < self.short_share else self.context
        return self.corpus.random_windows(self._generator, self.count, seq)

    def loss(self, windows: Tensor) -> Tensor:
        return bits_per_byte(self.model(windows[:, :-1]), windows)

    def batch(self, spent: float) -> tuple[Tensor, int]:
        windows = self.windows(spent)
        return self.loss(windows), windows[:, 1:].numel()

    @torch.no_grad()
    def judge(self) -> float:
        return fmean(self.loss(window[None]).item() for window in self.held_out)


def save_model(model: ByteTransformer, path: Path) -> None:
    with files.replacing(path) as file:
        torch.save(dict(config=asdict(model.config), weights=model.state_dict()), file)


def load_model(path: Path) -> ByteTransformer:
    """Return the model that `save_model` wrote, in eval mode. Raises ValueError naming the file; runs no code from it."""
    try:
        content = io.BytesIO(files.read_bytes(path, MOST_BYTES))
        if zipfile.ZipFile(content).testzip():  # torch.load compares no checksums
            raise ValueError("it is damaged")
        content.seek(0)
        saved = torch.load(content, weights_only=True)
        config = ModelConfig(**saved["config"])
        if config.context < 1 or config.layers > len(saved["weights"]):
            raise ValueError("its sizes are not those of its weights")
        with torch.device("meta"):  # takes no memory for sizes that are not those of the weights
            model = ByteTransformer(config)
        model.load_state_dict(saved["weights"], assign=True)
    except OSError as error:
        raise ValueError(f"--checkpoint: {str(path)!r} {files.why_not(error)}; `dilkit demo` writes one") from None
    except Exception as error:
        raise ValueError(f"--checkpoint: {str(path)!r} holds no model of this `dilkit demo`: {error_line(error)}") from None
    return model.eval()


def sample(args: argparse.Namespace) -> int:
    """Print `args.sample` and its continuation; 0. Raises ValueError for an unusable checkpoint."""
    model = load_model(args.checkpoint or args.out / "model.pt")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    prompt = args.sample.encode(errors="surrogateescape")
    drawn = bytes(sample_bytes(model, prompt, args.bytes, args.temperature, args.seed))
    if args.json:
        print_json("demo", dict(prompt=prompt.decode(errors="replace"), sample=drawn.decode(errors="replace")))
    else:
        print((prompt + drawn).decode(errors="replace"))
    return 0


@torch.no_grad()
def sample_bytes(model: ByteTransformer, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[int]:
    """Yield `count` bytes that continue `prompt`, each drawn from softmax(logits / temperature); 0 takes the likeliest."""
    generator, caches = torch.Generator().manual_seed(seed), model.caches()
    new = list(SEPARATOR + prompt)
    for _ in range(count):
        logits = model(torch.tensor([new]), caches)[0, -1]
        logits[SEPARATOR[0]] = -torch.inf  # no text holds it: the sample stays within one file
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator) if temperature else logits.argmax()
        new = [int(drawn)]
        yield new[0]
