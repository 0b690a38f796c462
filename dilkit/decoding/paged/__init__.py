"""Rows of many sequences, kept in pages of one pool.

kept_tokens.py   which tokens a branch keeps for which heads, and which of these a row sees
pool.py          the pages, and who holds them
stream.py        the rows that one sequence keeps of one branch: a queue of pages
sequence.py      a sequence: its streams, and how many tokens it has seen
spans.py         what new rows see of the pages, as the table of a step
prompts.py       rows that see none before them
cache.py         `PagedCache`: many sequences, and attention over them
"""
