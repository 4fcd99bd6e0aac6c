"""Engines: where a model runs."""
