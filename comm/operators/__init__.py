"""Torch operators of what ranks do together: what `torch.compile` sees in the place of exchanges, which it cannot trace.

    dilkit::attention_over_ranks             the forward pass of `ring_dilated_attention`       attention.py
    dilkit::attention_over_ranks_backward    its backward pass                                  attention.py
    dilkit::positions_over_ranks             `positions`                                        positions.py

Ranks agree and send when compiled code runs, and never while it is compiled: they compile at different times, and one that waited
for another then would wait for ever. `order.py` sees to it that compiled code keeps the order of exchanges. Calls that are not
compiled do without these operators.
"""
