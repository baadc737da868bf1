"""Logs of runs: ComfyUI's messages as backends sent them, and the names of the files that runs
created.

Internal: may change without notice.
"""
