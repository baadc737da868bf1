"""The control plane's API, one package per audience.

Internal: may change without notice.
"""
