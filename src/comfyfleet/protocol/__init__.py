"""ComfyUI's protocol as a server speaks it: what the built-in engine and the gateway share.

Internal: may change without notice.
"""
