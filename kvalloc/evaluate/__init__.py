"""Effects of a reduced cache on a model's answers."""
