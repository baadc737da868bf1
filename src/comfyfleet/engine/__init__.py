"""The built-in CPU backend: speaks ComfyUI's protocol and really executes. No torch, no GPU."""
