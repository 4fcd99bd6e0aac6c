"""What a reduced cache does to a model's answers."""
