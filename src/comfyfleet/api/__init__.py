"""Models of the API, shared by the server, workers and clients.

Internal: may change without notice.
"""
