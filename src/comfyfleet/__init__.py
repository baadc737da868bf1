"""Run ComfyUI as a production service."""

import logging

# A library leaves it to its user where its log goes; without this Python prints warnings of it.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"
