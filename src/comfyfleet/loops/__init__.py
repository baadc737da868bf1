"""Sweeps: what must happen though nobody asks."""
