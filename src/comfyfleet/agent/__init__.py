"""The worker beside a backend: poll, run one lease, heartbeat, heal."""
