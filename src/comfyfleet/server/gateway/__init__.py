"""The gateway: prompts of ComfyUI's clients as jobs, and jobs as ComfyUI's clients know them.

Internal: may change without notice.
"""
