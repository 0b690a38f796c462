"""The colours of pictures."""

SCALE = ("#f2f1ec", "#93d3c1", "#2b93b6", "#2c3d9c", "#641b78", "#b8266a", "#ee6d3b", "#f6c445")
"""The colours of counts 0, 1, 2, ...; the last one also stands for more. Neighbours differ in lightness or in hue."""
INK, GREY = "#33333b", "#6b6b76"
