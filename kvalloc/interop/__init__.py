"""Foreign formats and tools, one file each."""
