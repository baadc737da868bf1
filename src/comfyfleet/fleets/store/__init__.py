"""The only SQL of fleets, their workers, and what these were seen to do."""
