"""ComfyUI's protocol from the server's side, shared by the built-in engine and the gateway.

Internal: may change without notice.
"""
