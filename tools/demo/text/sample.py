"""Sampling from the demo's model, byte by byte."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Iterator
from itertools import chain

import torch

from dilkit.tools.console.text import print_json
from dilkit.tools.demo.text.corpus import SEPARATOR
from dilkit.tools.demo.text.model import ByteTransformer, load_model

MAX_WINDOW = 512
"""Bytes that are looked back at, at most: every byte costs a pass over all of them."""


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

    Segments are counted from the start of the sequence, so that start stays where it is while the sequence grows: all
    earlier rows are then what they were. Once it is full its older half is dropped, at once rather than byte by byte.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = min(MAX_WINDOW, model.config.context)
    sequence = list(SEPARATOR + prompt)[-limit:]
    for _ in range(count):
        if len(sequence) >= limit:
            del sequence[: limit // 2]
        sequence.append(_draw(model, sequence, temperature, generator))
        yield sequence[-1]


@torch.no_grad()
def _draw(model: ByteTransformer, sequence: list[int], temperature: float, generator: torch.Generator) -> int:
    logits = model(torch.tensor([sequence]))[0, -1]
    logits[SEPARATOR[0]] = -torch.inf  # no text holds it: the sample stays within one file
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
