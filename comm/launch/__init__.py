"""Ranks of a job: how they are started, and how they begin and end their work together."""
