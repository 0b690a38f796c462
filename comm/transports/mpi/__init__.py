"""The MPI transport, by mpi4py."""
