"""Budgets enforced in real inference: a cache that holds less, and frees evicted entries.

Needs torch and transformers (the ``run`` extra).
"""
