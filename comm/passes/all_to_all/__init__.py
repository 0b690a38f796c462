"""The all-to-all: rows travel to the rank that computes a small problem, results travel back (scatter, gather and hybrid)."""
