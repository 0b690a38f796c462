"""Context parallelism: a model of transformers whose sequence is cut over the ranks of a process group.

parallel.py    `context_parallel` and its result: the rows of each rank, and the weights of losses
batch.py       a batch with padding left out, labels shifted, sequences packed
positions.py   the positions that a model gives tokens that come without
attention.py   a layer's attention over the ranks

batch, whole on every rank
  |  batch.py: labels shifted, padding left out              (batch, seq), or packed (1, total) and cu_seq_lens
  |  parallel.py: cut by rows, one part a rank
  v
model, each layer on its rows   ---attention.py-->   dilkit.comm: ring_dilated_attention, ..._varlen
  |
  v
loss of this rank's rows, weighted so that averaged gradients are those of the whole batch
"""
