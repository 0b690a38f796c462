"""Sampling from the demo's model, byte by byte."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from dilkit import DilatedCache
from dilkit.tools.console.text import print_json
from dilkit.tools.demo.text.corpus import SEPARATOR
from dilkit.tools.demo.text.model import ByteTransformer, load_model


def sample(args: argparse.Namespace) -> int:
    """Print `args.sample` and its continuation as it comes; 0. Raises ValueError for a checkpoint that will not do."""
    if not args.temperature >= 0:
        raise ValueError(f"--temperature: {args.temperature} is not a number of 0 or more")
    model = load_model(args.checkpoint)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    prompt = args.sample.encode(errors="surrogateescape")
    drawn = sample_bytes(model, prompt, args.bytes, args.temperature, args.seed)
    if args.json:
        print_json("demo", dict(prompt=prompt.decode(errors="replace"), sample=bytes(drawn).decode(errors="replace")))
        return 0
    for text in codecs.iterdecode((bytes([byte]) for byte in chain(prompt, drawn)), "utf-8", errors="replace"):
        print(text, end="", flush=True)
    print()
    return 0


def sample_bytes(model: ByteTransformer, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[int]:
    """Yield `count` bytes that continue `prompt`, each drawn from softmax(logits / temperature); 0 takes the likeliest.

    Each byte costs one row: what it needs of those before is in the layers' caches, which are bounded.
    """
    generator, caches = torch.Generator().manual_seed(seed), model.caches()
    new = list(SEPARATOR + prompt)
    for _ in range(count):
        new = [_draw(model, new, caches, temperature, generator)]
        yield new[0]


@torch.no_grad()
def _draw(
    model: ByteTransformer, new: list[int], caches: Sequence[DilatedCache], temperature: float, generator: torch.Generator
) -> int:
    """The byte after `new`, which follow on what the caches have seen."""
    logits = model(torch.tensor([new]), caches)[0, -1]
    logits[SEPARATOR[0]] = -torch.inf  # no text holds it: the sample stays within one file
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
