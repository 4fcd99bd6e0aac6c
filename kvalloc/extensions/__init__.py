"""Extensions of a cache; the runtime imports none of them."""
