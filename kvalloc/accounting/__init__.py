"""Bytes of entries at any width, what they cost, and the one rounding rule."""
