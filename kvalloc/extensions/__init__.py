"""Listeners to a cache and what else is built on one; the runtime imports none of them."""
