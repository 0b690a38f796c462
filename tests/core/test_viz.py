"""Counts in characters and colours."""

from __future__ import annotations

from dilkit.viz.text import coloured


def test_colours_show_two_rows_a_line() -> None:
    lines = coloured([[0, 1], [1, 0], [2, 2]])
    assert [line.count("\u2580") for line in lines] == [2, 2]
    assert all(line.endswith("\033[0m") for line in lines)
    assert lines[0].split("\u2580")[0] != lines[0].split("\u2580")[1]
