"""Workers, a control plane in memory for them, and AWS: a simulator and a metadata service."""
