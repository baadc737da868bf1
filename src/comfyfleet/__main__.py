"""`python -m comfyfleet`: the same as the command."""

from comfyfleet.cli.main import main

if __name__ == "__main__":
    main()
