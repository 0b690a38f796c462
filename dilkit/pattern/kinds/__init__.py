"""The kinds of branches of a pattern."""
