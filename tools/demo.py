"""Shows the main job on the embedded defaults. `make demo` runs it."""
