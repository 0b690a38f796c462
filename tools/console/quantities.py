"""Numbers as people write them: 64K, 1e9, 50GB/s, 400T. Standard library only."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d[\d_]*|\d[\d_]*\.\d+)((?:e\+?\d{1,2})?)"
_SIZE = re.compile(_NUMBER + r"([KMGT]?)", re.IGNORECASE)
_RATE = re.compile(_NUMBER + r"\s*([KMGTP]?)(?:FLOPS?(?:/s)?)?", re.IGNORECASE)
_BANDWIDTH = re.compile(_NUMBER + r"\s*([KMGT]i?)?(B|bit|b)?(?:/s|ps)?")
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def whole_number(text: str) -> int:
    """65536, 65_536, 65,536, 64K (K, M, G, T: powers of 1024) or 1e9. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match and (number := _fraction(match) * _BINARY[match[3].upper()]).denominator == 1:
        return int(number)
    raise ValueError(f"{text!r} is not a whole number")


def flops(text: str) -> float:
    """An argument type: operations a second, as 400T or 9.7e12 (K, M, G, T, P: powers of 1000). 400 alone is refused."""
    match = _RATE.fullmatch(text.strip())
    if not match or not _fraction(match):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate; write operations a second, as 400T or 9.7e12")
    if not (match[2] or match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write operations a second, as {match[1]}T or {match[1]}e12")
    return float(_fraction(match) * _DECIMAL[match[3].upper()])


def bandwidth(text: str) -> float:
    """An argument type: bytes a second, as 50GB/s, 400Gbit/s, 40GiB/s or 5e10 (bytes). 50 alone is refused."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if not match or not _fraction(match):
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; write bytes or bits a second, as 50GB/s or 400Gbit/s")
    if not (match[2] or match[3] or match[4]):
        known = f"{match[1]}GB/s or {match[1]}Gbit/s"
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write bytes or bits a second, as {known}")
    unit = (match[3] or "").upper()
    scale = _BINARY[unit[0]] if unit.endswith("I") else _DECIMAL[unit]
    return float(_fraction(match) * scale / (8 if match[4] in ("bit", "b") else 1))


def _fraction(found: re.Match[str]) -> Fraction:
    return Fraction(found[1].replace(",", "").replace("_", "") + found[2])
