"""Runs the `comfyfleet` command via `python -m comfyfleet`."""

from comfyfleet.cli.main import main

if __name__ == "__main__":
    main()
