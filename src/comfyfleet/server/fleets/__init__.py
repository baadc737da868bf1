"""Fleets, their workers, and which workflows they may run."""
