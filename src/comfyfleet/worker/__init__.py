"""The worker that runs next to a backend. It polls for jobs, runs leases, sends heartbeats and
repairs its backend.

Internal: may change without notice.
"""
