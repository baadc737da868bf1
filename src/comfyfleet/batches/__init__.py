"""Many jobs of one effect under one id."""
