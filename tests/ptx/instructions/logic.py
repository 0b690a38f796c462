"""Comparisons, selections, logic and shifts."""

from __future__ import annotations

from ptx.instructions.rule import value

LOGIC, COMPARISON = "Logic and Shift Instructions", "Comparison and Selection Instructions"
BITS = r"(?P<t>b(?:16|32|64))"

RULES = (
    value(
        r"setp\.(?P<compare>eq|ne|lt|le|gt|ge)\.(?P<t>[bus](?:16|32|64))",
        f"{COMPARISON}: setp",
        "Whether the operands compare so, as numbers of the type.",
        "pred t t",
        "IS_{compare}({0}, {1})",
    ),
    value(
        r"setp\.(?P<compare>eq|ne|lt|le|gt|ge)\.f32",
        f"{COMPARISON}: setp",
        "Whether the operands compare so; false if one of them is NaN.",
        "pred f32 f32",
        "isunordered({0}, {1}) ? 0 : IS_{compare}({0}, {1})",
    ),
    value(
        r"setp\.(?P<compare>eq|ne|lt|le|gt|ge)u\.f32",
        f"{COMPARISON}: setp",
        "Whether the operands compare so; true if one of them is NaN.",
        "pred f32 f32",
        "isunordered({0}, {1}) ? 1 : IS_{compare}({0}, {1})",
    ),
    value(r"setp\.nan\.f32", f"{COMPARISON}: setp", "Whether an operand is NaN.", "pred f32 f32", "isunordered({0}, {1})"),
    value(r"setp\.num\.f32", f"{COMPARISON}: setp", "Whether no operand is NaN.", "pred f32 f32", "!isunordered({0}, {1})"),
    value(
        r"setp\.num\.f16",
        f"{COMPARISON}: setp",
        "Whether no operand is NaN.",
        "pred b16 b16",
        "!isunordered(half_to_float({0}), half_to_float({1}))",
    ),
    value(
        r"setp\.num\.bf16",
        f"{COMPARISON}: setp",
        "Whether no operand is NaN.",
        "pred b16 b16",
        "!isunordered(bfloat_to_float({0}), bfloat_to_float({1}))",
    ),
    value(
        r"selp\.(?P<t>[bus](?:16|32|64)|f32)",
        f"{COMPARISON}: selp",
        "The first operand where the predicate is true, else the second.",
        "t t t pred",
        "{2} ? {0} : {1}",
    ),
    value(rf"and\.(?:{BITS})", f"{LOGIC}: and", "Bit by bit.", "t t t", "{0} & {1}"),
    value(rf"or\.(?:{BITS})", f"{LOGIC}: or", "Bit by bit.", "t t t", "{0} | {1}"),
    value(rf"xor\.(?:{BITS})", f"{LOGIC}: xor", "Bit by bit, exclusive.", "t t t", "{0} ^ {1}"),
    value(rf"not\.(?:{BITS})", f"{LOGIC}: not", "Bit by bit.", "t t", "~{0}"),
    value(r"and\.pred", f"{LOGIC}: and", "Of predicates.", "pred pred pred", "{0} & {1}"),
    value(r"or\.pred", f"{LOGIC}: or", "Of predicates.", "pred pred pred", "{0} | {1}"),
    value(r"xor\.pred", f"{LOGIC}: xor", "Of predicates.", "pred pred pred", "{0} ^ {1}"),
    value(r"not\.pred", f"{LOGIC}: not", "Of a predicate.", "pred pred", "!{0}"),
    value(
        r"shl\.(?P<t>b(?P<bits>16|32|64))",
        f"{LOGIC}: shl",
        "To the left, zeros from the right; by more than all bits it is as by all.",
        "t t u32",
        "{1} >= {bits} ? 0 : {0} << {1}",
    ),
    value(
        r"shr\.(?P<t>[bu](?P<bits>16|32|64))",
        f"{LOGIC}: shr",
        "To the right, zeros from the left; by more than all bits it is as by all.",
        "t t u32",
        "{1} >= {bits} ? 0 : {0} >> {1}",
    ),
    value(
        r"shr\.(?P<t>s(?P<bits>16|32|64))",
        f"{LOGIC}: shr",
        "To the right, signs from the left; by more than all bits it is as by all.",
        "t t u32",
        "{0} >> ({1} >= {bits} ? {bits} - 1 : {1})",
    ),
    value(
        r"lop3\.b32",
        f"{LOGIC}: lop3",
        "Of three operands, bit by bit, what a table of eight bits says.",
        "b32 b32 b32 b32 u32",
        "three_bits({0}, {1}, {2}, {3})",
    ),
    value(
        r"prmt\.b32",
        "Data Movement and Conversion Instructions: prmt",
        "Four of the eight bytes of two operands, by four selectors; bit 3 of one: the sign of its byte, eight times.",
        "b32 b32 b32 b32",
        "permute_bytes({0}, {1}, {2})",
    ),
)
