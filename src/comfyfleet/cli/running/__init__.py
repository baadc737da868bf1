"""Parts of `comfyfleet run`: where, what goes in, how far it is, what came out."""
