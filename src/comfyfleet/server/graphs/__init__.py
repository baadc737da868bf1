"""Graphs of workflows: model, validation, and runs that start jobs node by node."""
