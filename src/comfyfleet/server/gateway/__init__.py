"""The gateway turns prompts of ComfyUI's clients into jobs, and shows jobs in ComfyUI's formats.

Internal: may change without notice.
"""
