"""Graphs on a control plane in this process, with workers that are played by hand."""
