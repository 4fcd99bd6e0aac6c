"""Budgets enforced in real inference: a cache that holds less, and frees what it does not hold.

Needs torch and transformers (the ``run`` extra).
"""
