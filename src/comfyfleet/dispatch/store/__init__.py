"""All SQL of the queue: `rows` and `moves` in Core, the hot path as two SQL texts side by side."""
