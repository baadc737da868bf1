"""Every node type that the built-in engine has."""

from collections.abc import Mapping

from comfyfleet.engine.node import NodeType


def registry() -> Mapping[str, NodeType]:
    """All node types by class_type."""
    return {}
