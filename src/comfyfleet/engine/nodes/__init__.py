"""Every node type that the built-in engine has, one module for each kind of work."""

from collections.abc import Mapping

from comfyfleet.engine.node import NodeType
from comfyfleet.engine.nodes import (
    batching,
    compositing,
    filtering,
    loading,
    logic,
    masking,
    models,
    own,
    resizing,
    saving,
    streaming,
    texts,
    transforming,
    videos,
)

KINDS = (
    loading,
    saving,
    streaming,
    models,
    resizing,
    transforming,
    filtering,
    compositing,
    batching,
    masking,
    logic,
    texts,
    videos,
    own,
)


def registry() -> Mapping[str, NodeType]:
    """All node types by class_type."""
    return {node.name: node for kind in KINDS for node in kind.NODES}
