"""Prompts: texts, tasks with answers, and the split between them."""
