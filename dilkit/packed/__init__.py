"""Sequences of different lengths in one call, packed one after the other."""
