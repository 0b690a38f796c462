"""Context parallelism: a model of transformers whose sequence is cut over the ranks of a process group.

batch, whole on every rank
  |  batch.py: labels shifted, padding left out              (batch, seq), or packed (1, total) and cu_seq_lens
  |  parallel.py: cut by rows, one part a rank
  v
model, each layer on its rows   ---attention.py-->   dilkit.comm: ring_dilated_attention, ..._varlen
  |
  v
loss of this rank's rows, weighted so that averaged gradients are those of the whole batch
"""
