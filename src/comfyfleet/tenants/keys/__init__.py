"""API keys: who calls, and what they may."""
