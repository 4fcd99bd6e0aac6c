"""Engines: where a model runs, in this process or in the workers of a Ray cluster."""
