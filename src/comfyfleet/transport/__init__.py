"""Calls over HTTP: one client base, back-off, errors, server-sent events, files, and safe fetches of customers' URLs.

Internal: may change without notice.
"""
