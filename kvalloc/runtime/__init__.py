"""Runtime: a cache that holds fewer entries, and frees evicted ones.

Needs torch and transformers (the ``run`` extra).
"""
