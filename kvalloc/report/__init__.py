"""Budgets and measurements as tables and pictures."""
