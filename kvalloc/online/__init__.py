"""Budgets decided from the prompt itself, while a model runs."""
