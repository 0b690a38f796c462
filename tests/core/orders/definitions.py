"""Codes of cells along Hilbert's curve and along Morton's, from their definitions."""

import numpy as np


def skilling(points: np.ndarray, bits: int) -> list[int]:
    """Hilbert codes by Skilling's transform (AIP Conf. Proc. 707, 2004): undo the turns from the top bit on, then Gray's code."""
    axes = [axis.astype(np.uint64).copy() for axis in points.T]
    for bit in reversed(range(1, bits)):
        here, below = np.uint64(1 << bit), np.uint64((1 << bit) - 1)
        for i in range(len(axes)):
            is_set = (axes[i] & here) != 0
            swapped = np.where(is_set, np.uint64(0), (axes[0] ^ axes[i]) & below)
            axes[0] ^= np.where(is_set, below, swapped)
            axes[i] ^= swapped
    for i in range(1, len(axes)):
        axes[i] ^= axes[i - 1]
    flips = np.zeros_like(axes[0])
    for bit in reversed(range(1, bits)):
        flips ^= np.where((axes[-1] >> np.uint64(bit)) & np.uint64(1), np.uint64((1 << bit) - 1), np.uint64(0))
    return interleaved(np.stack([axis ^ flips for axis in axes], 1), bits)


def interleaved(points: np.ndarray, bits: int) -> list[int]:
    codes = np.zeros(len(points), np.uint64)
    for bit in reversed(range(bits)):
        for axis in points.T:
            codes = codes << np.uint64(1) | axis.astype(np.uint64) >> np.uint64(bit) & np.uint64(1)
    return codes.tolist()
