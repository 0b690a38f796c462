"""Arguments that several commands share: the pattern, the call it is used in, the device. Standard library only."""

import argparse
import importlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from dilkit.device import Device, cuda_count, probe
from dilkit.files import read_bytes, why_not
from dilkit.pattern import Pattern
from dilkit.pattern.calls import PRESETS, pattern_of_text
from dilkit.problem import DTYPES, Problem
from dilkit.registry import list_backends
from dilkit.tools.console.text import nearest

DENSE = "dense"
PICTURES = (".png", ".svg", ".pdf")
"""The endings of files that pictures can be written to."""
_ALIASES = dict(
    fp64="float64", double="float64", fp32="float32", float="float32", bf16="bfloat16", fp16="float16", half="float16"
)


def add_pattern_arguments(
    parser: argparse.ArgumentParser,
    seq: int | None = 16384,
    heads: int = 8,
    segments: Sequence[int] | None = (2048, 4096, 8192, 16384),
    seq_help: str = "tokens (default %(default)s)",
) -> None:
    """Add --seq, --heads, --kv-heads, --segments, --pattern, --rates and --causal; read them with `pattern_of`.

    `seq=None`: --seq takes several lengths. `segments=None`: `set_series` is to set them once --seq is known.
    """
    shown = ",".join(map(str, segments)) if segments else "2048,8192,32768,... up to --seq, with rates 1,4,16,..."
    group = parser.add_argument_group("pattern")
    add = group.add_argument
    if seq is None:
        add("--seqs", "--seq", dest="seq", type=numbers, metavar="N,N", help=seq_help)
    else:
        add("--seq", type=whole(1), default=seq, metavar="N", help=seq_help)
    add("--heads", type=whole(1), default=heads, metavar="H", help="query heads (default %(default)s)")
    add("--kv-heads", type=whole(1), metavar="H", help="key/value heads, a divisor of --heads (default: --heads)")
    which = group.add_mutually_exclusive_group()
    lengths = f"segment lengths, or {DENSE} (default {shown})"
    which.add_argument("--segments", type=_segments, default=segments, metavar="W,W", help=lengths)
    add_written_pattern(which)
    add("--rates", type=numbers, metavar="R,R", help="dilation rates, one a segment length (default 1,2,4,...)")
    add("--causal", action="store_true", help="no token sees a later one")


def _segments(text: str) -> tuple[int, ...] | str:
    return DENSE if text.strip().lower() == DENSE else numbers(text)


def add_written_pattern(parser: argparse._ActionsContainer, before: str = "") -> None:
    """Add --pattern: a `Pattern`, None when it is not given."""
    written = f"""{before}branches, as 'SlidingWindow(512), GlobalTokens(4)'; a pattern, as
    "Pattern([8, 16], [1, 2], overlap='once')" or 'longformer(512, 16)' ({", ".join(PRESETS)}); or JSON, or a file with it"""
    parser.add_argument("--pattern", type=written_pattern, metavar="PATTERN", help=written)


def written_pattern(text: str) -> Pattern:
    """Parse a pattern: JSON, a file that holds JSON, or the call that makes it.

    >>> written_pattern("longformer(512, 16)") == Pattern.longformer(512, 16)
    True
    >>> print(written_pattern("SlidingWindow(512), GlobalTokens(4)"))
    Pattern.of(SlidingWindow(512), GlobalTokens(4))
    """
    try:
        if text.lstrip().startswith("{") or (text.rstrip().endswith(")") and not Path(text).exists()):
            return pattern_of_text(text)
        return Pattern.from_json(read_bytes(Path(text)).decode())
    except OSError as error:
        if text in PRESETS:
            parameters = ", ".join(inspect.signature(getattr(Pattern, text)).parameters)
            raise argparse.ArgumentTypeError(f"{text!r} needs numbers: {text}({parameters}), as in mistral(4096)") from None
        why = f"is no JSON object and no call, such as longformer(512, 16), and as a file it {why_not(error)}"
        raise argparse.ArgumentTypeError(f"{text!r} {why}") from None
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_call_arguments(parser: argparse.ArgumentParser, dim: int = 64, dtype: str = "float32", train: bool = True) -> None:
    """Add --dim, --dtype, --batch, --mask and, with `train`, --train; `problem_of` reads them together with the pattern's."""
    add = parser.add_argument_group("call").add_argument
    add("--dim", type=whole(1), default=dim, metavar="D", help="size of a head (default %(default)s)")
    add("--dtype", type=dtype_name, default=dtype, help="fp64, fp32, bf16, fp16 or torch's names (default %(default)s)")
    add("--batch", type=whole(1), default=1, metavar="B", help="sequences (default %(default)s)")
    add("--mask", action="store_true", help="with a key padding mask")
    if train:
        add("--train", action="store_true", help="with a backward pass")


def add_backend_argument(parser: argparse._ActionsContainer, help: str) -> None:
    """Add --backend: a tuple of known names, None when it is not given."""
    parser.add_argument("--backend", type=names(list_backends), metavar="A,B", help=help)


def set_series(args: argparse.Namespace) -> None:
    """Set LongNet's geometric series if --segments is not given: lengths 2048, 8192, ... up to --seq, rates 1, 4, ..."""
    if args.segments is not None or args.pattern is not None:
        return
    if args.rates is not None:
        raise ValueError("--rates: without --segments the rates are 1,4,16,...; give both, or neither")
    powers = [4**i for i in range(64) if i == 0 or 2048 * 4**i <= args.seq]
    args.segments, args.rates = tuple(2048 * power for power in powers), tuple(powers)


def pattern_of(args: argparse.Namespace) -> Pattern:
    """Return the pattern that the arguments of `add_pattern_arguments` name. Raises ValueError naming them."""
    if args.kv_heads is not None and args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads: {args.kv_heads} does not divide --heads {args.heads}")
    pattern: Pattern | None = args.pattern
    if pattern is not None and args.rates is not None:
        raise ValueError("--rates: does not go with --pattern, which says it itself; leave --rates out")
    if args.segments == DENSE and args.rates not in (None, (1,)):
        raise ValueError(f"--rates: {args.rates} does not go with --segments {DENSE}, whose one rate is 1; leave --rates out")
    if pattern is not None or args.segments == DENSE:
        return Pattern.dense() if pattern is None else pattern
    try:
        return Pattern(args.segments, args.rates or tuple(2**i for i in range(len(args.segments))))
    except ValueError as error:
        raise ValueError(f"--segments, --rates: {error}") from None


def problem_of(args: argparse.Namespace, device: Device | None = None) -> Problem:
    """Return the problem of `add_pattern_arguments` and `add_call_arguments`, on `device` (default: the CPU)."""
    sizes = dict(seq=args.seq, heads=args.heads, kv_heads=args.kv_heads or args.heads, head_dim=args.dim, batch=args.batch)
    flags = dict(is_causal=args.causal, key_padding_mask=args.mask, requires_grad=getattr(args, "train", False))
    options: dict[str, Any] = {**sizes, **flags, "device": device or probe("cpu")}
    return Problem(pattern=pattern_of(args), dtype=args.dtype, **options)


def changed(args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> dict[str, str]:
    """Return the option of each argument of `add_arguments` that is not at its default, by its name in `args`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    options = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    return {name: options[name] for name, value in defaults.items() if getattr(args, name) != value}


def make_folder(option: str, folder: Path) -> None:
    """Make the folder that `option` names, before there are results to lose. Raises ValueError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: folder {str(folder)!r} cannot be made: {error.strerror}; name another") from None


def picture_file(option: str, path: Path) -> None:
    """Raise ValueError naming `option` where no picture can be written to `path`."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{option}: {str(path)!r} must end in {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: the folder {str(path.parent)!r} does not exist; create it first")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(f"{option}: a picture needs matplotlib (pip install 'dilkit[plot]'): {error}") from None


def whole(at_least: int) -> Callable[[str], int]:
    """Return an argument type: whole numbers of `at_least` or more, as 65536, 65,536, 64K (powers of 1024) or 1e9."""

    def parse(text: str) -> int:
        match = re.fullmatch(_NUMBER, text.strip())
        number = _scaled(match, 1024) if match else Fraction(-1)
        if number.denominator > 1 or number < at_least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {at_least} or more")
        return int(number)

    return parse


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argument type: a finite number for which `fits` is true; `what` names it in errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


positive = number("a number above 0", lambda value: value > 0)
"""An argument type: a length of time, in the unit that its help names."""


def dtype_name(text: str) -> str:
    """Parse fp16, half or float16 as "float16", and so on."""
    name = _ALIASES.get(text.lower(), text.lower()).removeprefix("torch.")
    return name if name in DTYPES else one_of(text, ("fp64", "fp32", "bf16", "fp16", *DTYPES))


def assumed_device(text: str) -> Device:
    """Parse a device that need not be there, such as sm_61."""
    try:
        return Device.assume(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device_here(text: str) -> str:
    """Parse the name of a device of this machine, cpu, cuda or cuda:1. Imports torch for all but cpu."""
    kind, _, index = text.partition(":")
    if text == "cpu":
        return text
    if kind != "cuda" or not (index or "0").isdigit():
        hint = "`dilkit info --assume sm_61` takes a GPU that is not here"
        raise argparse.ArgumentTypeError(f"{text!r} is not known; choose from cpu, cuda, cuda:1, ... ({hint})")
    try:
        there = cuda_count()
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be reached: {type(error).__name__}: {error}") from None
    if int(index or 0) >= there:
        raise argparse.ArgumentTypeError(f"{text!r} is not there: torch sees {there} CUDA devices")
    return f"{kind}:{int(index or 0)}"


def numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers of 1 or more, comma-separated."""
    return tuple(whole(1)(part.strip()) for part in text.split(","))


def names(known: Callable[[], Sequence[str]] | None = None) -> Callable[[str], tuple[str, ...]]:
    """Return an argument type: names, comma-separated, each taken once; with `known` of those that it returns."""

    def parse(text: str) -> tuple[str, ...]:
        parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        if not all(parts):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty name; write it as sdpa,reference")
        return tuple(one_of(part, known()) for part in parts) if known else parts

    return parse


def one_of(name: str, known: Sequence[str]) -> str:
    """Return a name that is known. Raises `ArgumentTypeError` for others, with the nearest one."""
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; choose from {', '.join(known)}{nearest(name, known)}")
    return name


_PREFIXES = "KMGTP"
_NUMBER = (
    rf"(?P<digits>\d{{1,3}}(?:,\d{{3}})+|\d[\d_]*(?:\.\d+)?)(?P<power>(?:[eE]\+?\d{{1,2}})?)\s*(?P<prefix>(?i:[{_PREFIXES}])?)"
)


def _scaled(match: re.Match[str], base: int) -> Fraction:
    """Return the number that `_NUMBER` has matched, its prefix a power of `base`."""
    number = Fraction(match["digits"].replace(",", "").replace("_", "") + match["power"])
    return number * Fraction(base) ** (_PREFIXES.index(match["prefix"].upper()) + 1 if match["prefix"] else 0)


def flops(text: str) -> float:
    """Parse operations a second, as 400T or 9.7e12 (K, M, G, T, P: powers of 1000). 400 alone is refused."""
    match, example = re.fullmatch(rf"{_NUMBER}(?i:FLOPS?(?:/s)?)?", text.strip()), "write operations a second, as"
    if not match or not _scaled(match, 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate; {example} 400T or 9.7e12")
    if not (match["power"] or match["prefix"]):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; {example} {match['digits']}T or {match['digits']}e12")
    return float(_scaled(match, 1000))


def bandwidth(text: str) -> float:
    """Parse bytes a second, as 50GB/s, 400Gbit/s, 40GiB/s or 5e10 (bytes). 50 alone is refused."""
    unit = rf"(?<![kmgtp])(?P<binary>(?:(?<=[{_PREFIXES}])i)?)(?P<unit>(?:B|bit|b)?)(?:/s|ps)?"  # mb/s: megabytes, or bits
    match = re.fullmatch(_NUMBER + unit, text.strip())
    example = "write bytes or bits a second, as"
    if not match or not _scaled(match, 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; {example} 50GB/s or 400Gbit/s")
    if not (match["power"] or match["prefix"] or match["unit"]):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; {example} {match['digits']}GB/s or {match['digits']}Gbit/s")
    return float(_scaled(match, 1024 if match["binary"] else 1000) / (8 if match["unit"] in ("bit", "b") else 1))
