"""Continuous batching of transformers, `generate_batch`, whose rows lie in a pool of its own.

batch.py       a batch as a layer gets it: the rows of each sequence, and the places in the pool of those before
attention.py   a layer's attention

batch, the new rows of all sequences   (1, rows)
  |  prompts                ---> dilated_attention_varlen
  |  chunks and steps       ---> one call of the step kernel: rows of the pool, through `read_index`, and new rows
  v
out (1, rows, heads, head_dim);  the new keys and values go into the pool after that
"""
