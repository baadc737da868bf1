"""The control plane: everything that `comfyfleet serve` runs.

Internal: may change without notice.
"""
