"""`dilkit bench --suite patterns`: branches of other kinds than dilated segments.

window.py   the same window by FlexAttention
chosen.py   the ways to compute blocks that each call gives, forward and backward
ways.py     the ways to compute a pattern, each checked against the definition before it is timed
cases.py    their sizes
suite.py    the measurements: windows, mixes of kinds, rates, block lists, a million tokens
targets.py  what the figures must be
"""
