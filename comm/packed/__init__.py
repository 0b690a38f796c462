"""Packed sequences over ranks."""
