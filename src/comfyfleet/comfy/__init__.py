"""Backends: things that execute prompts, behind one interface."""
