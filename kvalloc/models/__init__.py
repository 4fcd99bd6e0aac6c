"""All that touches the inside of transformers: loading, the attention hook, RoPE, GGUF."""
