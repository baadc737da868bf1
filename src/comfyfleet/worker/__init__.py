"""The worker beside a backend: polls for jobs, runs one lease at a time, sends heartbeats and repairs its backend.

Internal: may change without notice.
"""
