"""Instructions whose result is an expression of their operands, by section of the PTX ISA."""

from __future__ import annotations

from ptx.emulator.rules import value

INTEGER = r"(?P<t>[us](?:16|32|64))"
ANY_INTEGER = r"[us](?:8|16|32|64)"
COMPARISON = r"(?P<compare>eq|ne|lt|le|gt|ge)"
BITS = r"(?P<t>b(?:16|32|64))"

INTEGER_ARITHMETIC = (
    value(rf"add\.{INTEGER}", "t t t", "{0} + {1}"),
    value(rf"sub\.{INTEGER}", "t t t", "{0} - {1}"),
    value(rf"mul\.lo\.{INTEGER}", "t t t", "{0} * {1}"),
    value(r"mul\.hi\.(?P<t>[us]32)", "t t t", "((int64_t){0} * (int64_t){1}) >> 32"),
    value(r"mul\.hi\.(?P<t>u16)", "t t t", "(uint32_t){0} * {1} >> 16"),
    value(r"mul\.wide\.(?P<t>[us](?:16|32))", "wide t t", "({C}){0} * ({C}){1}"),
    value(rf"mad\.lo\.{INTEGER}", "t t t t", "{0} * {1} + {2}"),
    value(r"mad\.wide\.(?P<t>[us](?:16|32))", "wide t t wide", "({C}){0} * ({C}){1} + {2}"),
    value(r"(?P<which>div|rem)\.(?P<t>[us](?:32|64))", "t t t", "{which}_{t}({0}, {1}, {line})"),
    value(r"(?P<which>div|rem)\.(?P<t>u16)", "t t t", "{which}_u32({0}, {1}, {line})"),
    value(rf"min\.{INTEGER}", "t t t", "{0} < {1} ? {0} : {1}"),
    value(rf"max\.{INTEGER}", "t t t", "{0} > {1} ? {0} : {1}"),
    value(r"abs\.(?P<t>s(?:16|32|64))", "t t", "{0} < 0 ? -{0} : {0}"),
    value(r"neg\.(?P<t>s(?:16|32|64))", "t t", "-{0}"),
    value(r"popc\.b32", "u32 b32", "__builtin_popcount({0})"),
    value(r"popc\.b64", "u32 b64", "__builtin_popcountll({0})"),
    value(r"bfe\.u32", "u32 u32 u32 u32", "bit_field({0}, {1}, {2})"),
    value(r"bfe\.s32", "s32 s32 u32 u32", "signed_bit_field({0}, {1}, {2}, {line})"),
    value(r"bfi\.(?P<t>b(?P<bits>32|64))", "t t t u32 u32", "insert_bits({0}, {1}, {2}, {3}, {bits})"),
)
FLOATING_POINT = (
    value(r"add(?:\.rn)?\.f32", "f32 f32 f32", "{0} + {1}", "FP32"),
    value(r"sub(?:\.rn)?\.f32", "f32 f32 f32", "{0} - {1}", "FP32"),
    value(r"mul(?:\.rn)?\.f32", "f32 f32 f32", "{0} * {1}", "FP32"),
    value(r"fma\.rn\.f32", "f32 f32 f32 f32", "__builtin_fmaf({0}, {1}, {2})", "FMA"),
    value(
        r"fma\.rn\.ftz\.f32",
        "f32 f32 f32 f32",
        "flushed(__builtin_fmaf(flushed({0}), flushed({1}), flushed({2})))",
        "FMA",
    ),
    value(r"div\.rn\.f32", "f32 f32 f32", "{0} / {1}", "SPECIAL"),
    value(r"div\.full\.f32", "f32 f32 f32", "quotient_full({0}, {1})", "SPECIAL"),
    value(r"div\.approx\.f32", "f32 f32 f32", "quotient_approx({0}, {1})", "SPECIAL"),
    value(r"rcp\.rn\.f32", "f32 f32", "1.0f / {0}", "SPECIAL"),
    value(r"rcp\.approx\.ftz\.f32", "f32 f32", "reciprocal_approx({0})", "SPECIAL"),
    value(r"sqrt\.rn\.f32", "f32 f32", "sqrtf({0})", "SPECIAL"),
    value(r"sqrt\.approx\.ftz\.f32", "f32 f32", "root_approx({0})", "SPECIAL"),
    value(r"ex2\.approx\.f32", "f32 f32", "exp2_full({0})", "SPECIAL"),
    value(r"ex2\.approx\.ftz\.f32", "f32 f32", "exp2_approx({0})", "SPECIAL"),
    # Of a NaN and a number the result is the number; with .NaN it is NaN.
    value(r"min\.f32", "f32 f32 f32", "fminf({0}, {1})"),
    value(r"min\.NaN\.f32", "f32 f32 f32", "{0} < {1} || isnan({0}) ? {0} : {1}"),
    value(r"max\.f32", "f32 f32 f32", "fmaxf({0}, {1})"),
    value(r"abs\.f32", "f32 f32", "fabsf({0})"),
    value(r"neg\.f32", "f32 f32", "-{0}"),
)
COMPARISON_AND_SELECTION = (
    value(rf"setp\.{COMPARISON}\.(?P<t>[bus](?:16|32|64))", "pred t t", "IS_{compare}({0}, {1})"),
    # Where an operand is NaN the result is false; with u it is true.
    value(rf"setp\.{COMPARISON}\.f32", "pred f32 f32", "isunordered({0}, {1}) ? 0 : IS_{compare}({0}, {1})"),
    value(rf"setp\.{COMPARISON}u\.f32", "pred f32 f32", "isunordered({0}, {1}) ? 1 : IS_{compare}({0}, {1})"),
    value(r"setp\.nan\.f32", "pred f32 f32", "isunordered({0}, {1})"),
    value(r"setp\.num\.f32", "pred f32 f32", "!isunordered({0}, {1})"),
    value(r"setp\.num\.f16", "pred b16 b16", "!isunordered(half_to_float({0}), half_to_float({1}))"),
    value(r"setp\.num\.bf16", "pred b16 b16", "!isunordered(bfloat_to_float({0}), bfloat_to_float({1}))"),
    value(r"selp\.(?P<t>[bus](?:16|32|64)|f32)", "t t t pred", "{2} ? {0} : {1}"),
)
LOGIC_AND_SHIFT = (
    value(rf"and\.(?:{BITS})", "t t t", "{0} & {1}"),
    value(rf"or\.(?:{BITS})", "t t t", "{0} | {1}"),
    value(rf"xor\.(?:{BITS})", "t t t", "{0} ^ {1}"),
    value(rf"not\.(?:{BITS})", "t t", "~{0}"),
    value(r"and\.pred", "pred pred pred", "{0} & {1}"),
    value(r"or\.pred", "pred pred pred", "{0} | {1}"),
    value(r"xor\.pred", "pred pred pred", "{0} ^ {1}"),
    value(r"not\.pred", "pred pred", "!{0}"),
    # A shift by more than all bits is one by all.
    value(r"shl\.(?P<t>b(?P<bits>16|32|64))", "t t u32", "{1} >= {bits} ? 0 : {0} << {1}"),
    value(r"shr\.(?P<t>[bu](?P<bits>16|32|64))", "t t u32", "{1} >= {bits} ? 0 : {0} >> {1}"),
    value(r"shr\.(?P<t>s(?P<bits>16|32|64))", "t t u32", "{0} >> ({1} >= {bits} ? {bits} - 1 : {1})"),
    value(r"lop3\.b32", "b32 b32 b32 b32 u32", "three_bits({0}, {1}, {2}, {3})"),
)
DATA_MOVEMENT_AND_CONVERSION = (
    value(r"mov\.pred", "pred pred", "{0}"),
    value(r"mov\.(?P<t>[us](?:16|32|64)|b16|f32)", "t t", "{0}"),
    value(r"prmt\.b32", "b32 b32 b32 b32", "permute_bytes({0}, {1}, {2})"),
    value(rf"cvt\.(?P<t>{ANY_INTEGER})\.(?P<from>{ANY_INTEGER})", "t from", "{0}"),
    value(rf"cvt\.rn\.f32\.(?P<from>{ANY_INTEGER})", "f32 from", "(float){0}"),
    value(r"cvt\.rni\.f32\.f32", "f32 f32", "nearbyintf({0})"),
    value(r"cvt\.rzi\.s32\.f32", "s32 f32", "float_to_int({0})"),
    value(r"cvt\.rzi\.s16\.f32", "s16 f32", "float_to_short({0})"),
    value(r"cvt\.f32\.f16", "f32 b16", "half_to_float({0})"),
    value(r"cvt\.f32\.bf16", "f32 b16", "bfloat_to_float({0})"),
    value(r"cvt\.rn\.f16\.f32", "b16 f32", "float_to_half({0})"),
    value(r"cvt\.rn\.bf16\.f32", "b16 f32", "float_to_bfloat({0})"),
    # The first source is the upper half.
    value(r"cvt\.rn\.f16x2\.f32", "b32 f32 f32", "pack(float_to_half({0}), float_to_half({1}))"),
    value(r"cvt\.rn\.bf16x2\.f32", "b32 f32 f32", "pack(float_to_bfloat({0}), float_to_bfloat({1}))"),
    value(r"cvta\.to\.global\.u64", "u64 u64", "{0}"),
    value(r"cvta\.shared\.u64", "u64 u64", "SHARED_WINDOW + {0}"),
    value(r"cvta\.to\.shared\.u64", "u64 u64", "{0} - SHARED_WINDOW"),
)
BETWEEN_LANES = (
    value(r"vote\.sync\.ballot\.b32", "b32 pred u32", "warp_value(BALLOT, {0}, {1}, {line})"),
    value(
        r"redux\.sync\.(?P<operation>add|min|max)\.s32",
        "s32 s32 u32",
        "warp_value(REDUCE_{operation}, {0}, {1}, {line})",
    ),
)
RULES = (
    *(*DATA_MOVEMENT_AND_CONVERSION, *INTEGER_ARITHMETIC, *FLOATING_POINT),
    *(*COMPARISON_AND_SELECTION, *LOGIC_AND_SHIFT, *BETWEEN_LANES),
)
