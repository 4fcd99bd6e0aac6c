"""Data that ships with kvalloc, read through :mod:`importlib.resources`."""
