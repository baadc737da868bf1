"""Backends for tests: prompts and nodes, stand-ins for ComfyUI and Comfy Cloud, and a proxy that
injects faults."""
