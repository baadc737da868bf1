"""The control plane put together: databases, store, queue and jobs, from settings."""
