"""The backend `flex`: torch's FlexAttention, which generates kernels from what a pair sees and what its score becomes.

pairs.py    which pairs forms show, in torch's operators on indices
blocks.py   which blocks of rows and columns may hold such a pair
call.py     a call: padded tensors, the functions of pairs and scores, and the compiled function that takes them
backend.py  its limits, forward and backward
"""
