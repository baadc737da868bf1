"""Calls over HTTP: a client base, back-off, errors, server-sent events, files, and safe fetches of
customers' URLs.

Internal: may change without notice.
"""
