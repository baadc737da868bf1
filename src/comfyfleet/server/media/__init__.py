"""Stored files of a tenant, and its users' media: images, videos and audio.

Internal: may change without notice."""
