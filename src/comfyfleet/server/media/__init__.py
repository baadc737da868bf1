"""Stored files of a tenant, and the media of its users: pictures, videos, sound.

Internal: may change without notice.
"""
