"""Foreign formats and tools."""
