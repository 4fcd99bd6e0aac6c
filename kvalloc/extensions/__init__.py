"""What is built on top of a cache: each listens to it, and the runtime knows none of it."""
