"""Budgets decided while a model runs."""
