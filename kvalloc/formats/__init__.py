"""The files kvalloc reads and writes: one definition each."""
