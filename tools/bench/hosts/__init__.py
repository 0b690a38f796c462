"""`dilkit bench --suite hosts`: attention over hosts whose links are slower than memory, beside other sequence-parallel schemes.

network.py   hosts on one machine: network namespaces and shaped links
peers.py     the schemes beside ours: a ring of all keys and values, their all-gather, Ulysses' all-to-all
tasks.py     what the ranks of a job do
"""
