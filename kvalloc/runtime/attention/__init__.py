"""Attention over what a layer keeps of a prompt and the tokens after it."""
