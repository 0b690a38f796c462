"""Continuous batching of transformers, `generate_batch`, whose rows lie in a pool of its own.

manager.py     what lets transformers' manager take a model with dilated attention
batch.py       a batch as a layer gets it: which rows are whose, and where the pool has what came before
attention.py   what a layer computes

batch, the new rows of all sequences   (1, rows)
  |  prompts                ---> dilated_attention_varlen
  |  chunks and steps       ---> one call of the step kernel: rows of the pool, through `read_index`, and new rows
  v
out (1, rows, heads, head_dim);  the new keys and values go into the pool after that
"""
