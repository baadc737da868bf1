"""Graphs of workflows: model, validation, and runs that start jobs node by node.

Internal: may change without notice.
"""
