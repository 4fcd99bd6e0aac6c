"""Public-domain texts; ``README.md`` names their source, licence and role."""
