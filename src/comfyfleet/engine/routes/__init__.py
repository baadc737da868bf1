"""The routes of a ComfyUI server, by what they are about."""
