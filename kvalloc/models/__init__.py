"""Models: all code that touches the inside of transformers."""
