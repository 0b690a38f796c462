"""Position biases of models: values that their layers hand to the attention function in place of tensors of all pairs.

position_bias.py the value that is handed
tables.py        T5: a table of buckets, of the first layer
alibi.py         Bloom and MPT: slopes, in layers that do not look their attention up by themselves
"""
