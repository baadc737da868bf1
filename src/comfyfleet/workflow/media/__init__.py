"""The workflow and the prompt inside a file that ComfyUI or one of its savers wrote. Bytes in, no I/O."""
