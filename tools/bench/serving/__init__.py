"""`dilkit bench --suite serving`: packed sequences, decoding and prefill on a CPU.

cases.py      their sizes
suite.py      the steps
packed.py     sequences packed, one by one, and padded
decoding.py   steps of decoding against each kind of cache
kept.py       steps beside reading what is kept, rows kept in fewer bytes, many sequences
llama.py      a model of Llama's shape
targets.py    what the figures must be
"""
