"""What every room needs: errors, ids, clock, settings."""
