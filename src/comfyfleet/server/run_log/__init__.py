"""Logs of runs: ComfyUI's messages as backends sent them, and the names of the files that runs made.

Internal: may change without notice.
"""
