"""Public-domain texts; ``README.md`` names source, licence and role."""
