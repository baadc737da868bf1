"""Run ComfyUI as a production service."""

import logging

# The application that uses this library configures logging. Without this handler, Python would
# print our warnings to stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"
