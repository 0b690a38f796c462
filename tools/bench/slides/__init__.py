"""`dilkit bench --suite slides`: GigaPath's slide encoder on a CPU.

cases.py      their sizes
suite.py      the steps
calls.py      slides, and what is computed of them
targets.py    what the figures must be
"""
