"""`dilkit bench --suite slides`: GigaPath's slide encoder on a CPU.

suite.py      the steps
calls.py      slides, and calls on them with their time and memory
targets.py    what the figures must be
"""
