"""Who did what, when, to what."""
