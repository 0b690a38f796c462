"""Arithmetic of integers and of floats."""

from __future__ import annotations

from ptx.instructions.rule import value

INTEGER = r"(?P<t>[us](?:16|32|64))"
WHOLE, FLOATS = "Integer Arithmetic Instructions", "Floating Point Instructions"

RULES = (
    value(rf"add\.{INTEGER}", f"{WHOLE}: add", "The sum, without the carry.", "t t t", "{0} + {1}"),
    value(rf"sub\.{INTEGER}", f"{WHOLE}: sub", "The difference, without the borrow.", "t t t", "{0} - {1}"),
    value(rf"mul\.lo\.{INTEGER}", f"{WHOLE}: mul", ".lo: the lower half of the product.", "t t t", "{0} * {1}"),
    value(
        r"mul\.hi\.(?P<t>[us]32)",
        f"{WHOLE}: mul",
        ".hi: the upper half of the product.",
        "t t t",
        "((int64_t){0} * (int64_t){1}) >> 32",
    ),
    value(r"mul\.hi\.(?P<t>u16)", f"{WHOLE}: mul", ".hi: the upper half of the product.", "t t t", "(uint32_t){0} * {1} >> 16"),
    value(
        r"mul\.wide\.(?P<t>[us](?:16|32))",
        f"{WHOLE}: mul",
        ".wide: the whole product, of twice as many bits.",
        "wide t t",
        "({C}){0} * ({C}){1}",
    ),
    value(
        rf"mad\.lo\.{INTEGER}",
        f"{WHOLE}: mad",
        ".lo: the lower half of the product, and a third operand added.",
        "t t t t",
        "{0} * {1} + {2}",
    ),
    value(
        r"mad\.wide\.(?P<t>[us](?:16|32))",
        f"{WHOLE}: mad",
        ".wide: the whole product, and a third operand of as many bits added.",
        "wide t t wide",
        "({C}){0} * ({C}){1} + {2}",
    ),
    value(
        r"(?P<which>div|rem)\.(?P<t>[us](?:32|64))",
        f"{WHOLE}: div, rem",
        "The quotient, towards zero, or what it leaves, with the sign of the dividend. By 0 it is not defined.",
        "t t t",
        "{which}_{t}({0}, {1}, {line})",
    ),
    value(
        r"(?P<which>div|rem)\.(?P<t>u16)",
        f"{WHOLE}: div, rem",
        "The quotient, towards zero, or what it leaves. By 0 it is not defined.",
        "t t t",
        "{which}_u32({0}, {1}, {line})",
    ),
    value(rf"min\.{INTEGER}", f"{WHOLE}: min", "The lesser.", "t t t", "{0} < {1} ? {0} : {1}"),
    value(rf"max\.{INTEGER}", f"{WHOLE}: max", "The greater.", "t t t", "{0} > {1} ? {0} : {1}"),
    value(r"abs\.(?P<t>s(?:16|32|64))", f"{WHOLE}: abs", "The absolute value.", "t t", "{0} < 0 ? -{0} : {0}"),
    value(r"neg\.(?P<t>s(?:16|32|64))", f"{WHOLE}: neg", "The negative.", "t t", "-{0}"),
    value(r"popc\.b32", f"{WHOLE}: popc", "How many bits are set.", "u32 b32", "__builtin_popcount({0})"),
    value(r"popc\.b64", f"{WHOLE}: popc", "How many bits are set.", "u32 b64", "__builtin_popcountll({0})"),
    value(
        r"bfe\.u32",
        f"{WHOLE}: bfe",
        "So many bits of the first operand from a bit on, and zeros before them; place and count are the last bytes.",
        "u32 u32 u32 u32",
        "bit_field({0}, {1}, {2})",
    ),
    value(
        r"bfe\.s32",
        f"{WHOLE}: bfe",
        "So many bits of the first operand from a bit on, which lie within it, and the sign of the last before them.",
        "s32 s32 u32 u32",
        "signed_bit_field({0}, {1}, {2}, {line})",
    ),
    value(
        r"bfi\.(?P<t>b(?P<bits>32|64))",
        f"{WHOLE}: bfi",
        "The second operand with so many bits of the first from a bit on; place and count are the last bytes.",
        "t t t u32 u32",
        "insert_bits({0}, {1}, {2}, {3}, {bits})",
    ),
    value(r"add\.f32", f"{FLOATS}: add", "The sum, rounded to nearest even.", "f32 f32 f32", "{0} + {1}", "FP32"),
    value(r"sub\.f32", f"{FLOATS}: sub", "The difference, rounded to nearest even.", "f32 f32 f32", "{0} - {1}", "FP32"),
    value(r"mul\.f32", f"{FLOATS}: mul", "The product, rounded to nearest even.", "f32 f32 f32", "{0} * {1}", "FP32"),
    value(
        r"fma\.rn\.f32",
        f"{FLOATS}: fma",
        "Product and sum, rounded once, to nearest even.",
        "f32 f32 f32 f32",
        "__builtin_fmaf({0}, {1}, {2})",
        "FMA",
    ),
    value(r"div\.rn\.f32", f"{FLOATS}: div", ".rn: rounded to nearest even.", "f32 f32 f32", "{0} / {1}", "SPECIAL"),
    value(r"rcp\.rn\.f32", f"{FLOATS}: rcp", ".rn: the reciprocal, rounded to nearest even.", "f32 f32", "1.0f / {0}", "SPECIAL"),
    value(r"sqrt\.rn\.f32", f"{FLOATS}: sqrt", ".rn: the root, rounded to nearest even.", "f32 f32", "sqrtf({0})", "SPECIAL"),
    value(
        r"rcp\.approx\.ftz\.f32",
        f"{FLOATS}: rcp",
        ".approx: the reciprocal, within a unit of the last place; .ftz: subnormal operands and results are 0.",
        "f32 f32",
        "reciprocal_approx({0})",
        "SPECIAL",
    ),
    value(r"min\.f32", f"{FLOATS}: min", "The lesser; of a NaN and a number the number.", "f32 f32 f32", "fminf({0}, {1})"),
    value(r"max\.f32", f"{FLOATS}: max", "The greater; of a NaN and a number the number.", "f32 f32 f32", "fmaxf({0}, {1})"),
    value(r"abs\.f32", f"{FLOATS}: abs", "The absolute value.", "f32 f32", "fabsf({0})"),
    value(r"neg\.f32", f"{FLOATS}: neg", "The negative.", "f32 f32", "-{0}"),
    value(
        r"ex2\.approx\.ftz\.f32",
        f"{FLOATS}: ex2",
        "2 to a power, within two units of the last place; .ftz: subnormal operands and results are 0.",
        "f32 f32",
        "exp2_approx({0})",
        "SPECIAL",
    ),
)
