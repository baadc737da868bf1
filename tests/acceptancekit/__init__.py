"""The whole thing as processes: PostgreSQL, control plane, workers, engines, metadata services."""
