"""A tenant's stored objects."""
