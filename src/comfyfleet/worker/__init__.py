"""The worker that runs next to a backend. It polls for jobs, runs leases, sends heartbeats and
repairs its backend.

This package is internal and may change without notice.
"""
