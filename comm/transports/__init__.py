"""Transports: how the ranks of a process group exchange rows, over MPI, torch.distributed or threads."""
