"""`dilkit bench --suite scores`: what biases and softcaps cost, beside no bias and beside torch with a matrix of all pairs.

ways.py     the ways to compute a problem, each checked against the definition before it is timed
cases.py    their sizes
suite.py    the measurements: a bias of each kind forward and backward, a slide of 20,000 tiles, a layer like Gemma 2's
targets.py  what the figures must be
"""
