"""The control plane, which `comfyfleet serve` runs.

Internal: may change without notice.
"""
