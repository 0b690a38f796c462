"""The forward and the backward pass of attention over ranks: what a rank sends, computes and merges."""
