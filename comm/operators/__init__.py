"""Torch operators of what ranks do together: what `torch.compile` sees in place of exchanges, which it cannot trace.

Ranks agree and send when compiled code runs, and never while it is compiled: they compile at different times, and one that waited
for another then would wait for ever. `order.py` sees to it that compiled code keeps the order of exchanges.
"""
