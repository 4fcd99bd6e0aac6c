"""Extensions of a cache."""
