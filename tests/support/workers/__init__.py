"""Workers, an in-memory control plane for them, an AWS simulator, and a metadata service."""
