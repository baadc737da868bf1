"""Fleets, workers and workflows that tests begin with."""
