"""Budgets enforced in real inference: a cache that holds less, and frees what it does not hold.

Needs torch and transformers (the ``run`` extra).
"""

from __future__ import annotations

from kvalloc.runtime.answering import answer
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.loading import load_cache
from kvalloc.runtime.making import make_cache
from kvalloc.runtime.options import CacheOptions

__all__ = ["BudgetCache", "CacheOptions", "answer", "load_cache", "make_cache"]
