"""Workers, a control plane in memory beside them, and AWS: a simulator and a metadata service."""
