"""Attention from new tokens to kept entries and later tokens."""
