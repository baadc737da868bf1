"""Backends: prompts and nodes, stand-ins for ComfyUI and Comfy Cloud, a meddling proxy."""
