"""Conversions between types, and between kinds of addresses."""

from __future__ import annotations

from ptx.instructions.rule import value

SECTION = "Data Movement and Conversion Instructions"
WHOLE = r"[us](?:8|16|32|64)"

RULES = (
    value(
        rf"cvt\.(?P<t>{WHOLE})\.(?P<from>{WHOLE})",
        f"{SECTION}: cvt",
        "The lower bits, or more of them, by the sign of the source's type.",
        "t from",
        "{0}",
    ),
    value(rf"cvt\.rn\.f32\.(?P<from>{WHOLE})", f"{SECTION}: cvt", ".rn: rounded to nearest even.", "f32 from", "(float){0}"),
    value(r"cvt\.rni\.f32\.f32", f"{SECTION}: cvt", ".rni: to the nearest integer, even of two.", "f32 f32", "nearbyintf({0})"),
    value(
        r"cvt\.rzi\.s32\.f32",
        f"{SECTION}: cvt",
        ".rzi: to an integer towards zero; NaN is 0, what is too large the largest.",
        "s32 f32",
        "float_to_int({0})",
    ),
    value(
        r"cvt\.rzi\.s16\.f32",
        f"{SECTION}: cvt",
        ".rzi: to an integer towards zero; NaN is 0, what is too large the largest.",
        "s16 f32",
        "float_to_short({0})",
    ),
    value(r"cvt\.f32\.f16", f"{SECTION}: cvt", "Every half is a float.", "f32 b16", "half_to_float({0})"),
    value(r"cvt\.f32\.bf16", f"{SECTION}: cvt", "Every bfloat is a float.", "f32 b16", "bfloat_to_float({0})"),
    value(r"cvt\.rn\.f16\.f32", f"{SECTION}: cvt", ".rn: rounded to nearest even.", "b16 f32", "float_to_half({0})"),
    value(r"cvt\.rn\.bf16\.f32", f"{SECTION}: cvt", ".rn: rounded to nearest even.", "b16 f32", "float_to_bfloat({0})"),
    value(
        r"cvt\.rn\.f16x2\.f32",
        f"{SECTION}: cvt",
        "Two halves: the first source is the upper one.",
        "b32 f32 f32",
        "pack(float_to_half({0}), float_to_half({1}))",
    ),
    value(
        r"cvt\.rn\.bf16x2\.f32",
        f"{SECTION}: cvt",
        "Two bfloats: the first source is the upper one.",
        "b32 f32 f32",
        "pack(float_to_bfloat({0}), float_to_bfloat({1}))",
    ),
    value(r"cvta\.to\.global\.u64", f"{SECTION}: cvta", "A generic one, as of global memory.", "u64 u64", "{0}"),
    value(
        r"cvta\.shared\.u64",
        f"{SECTION}: cvta",
        "Of shared memory, as a generic one.",
        "u64 u64",
        "SHARED_WINDOW + {0}",
    ),
    value(
        r"cvta\.to\.shared\.u64",
        f"{SECTION}: cvta",
        "A generic one, as of shared memory.",
        "u64 u64",
        "{0} - SHARED_WINDOW",
    ),
)
