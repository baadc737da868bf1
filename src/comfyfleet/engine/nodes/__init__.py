"""All node types of the built-in engine, with one module for each kind of work.

Internal: may change without notice.
"""

from collections.abc import Mapping

from comfyfleet.engine.node import EngineNodeType
from comfyfleet.engine.nodes import diagnostics, files, geometry, images, values

KINDS = (
    files.LOADERS,
    files.SAVERS,
    files.STREAMERS,
    files.MODEL_NODES,
    geometry.RESIZERS,
    geometry.TRANSFORMERS,
    images.FILTERS,
    images.COMPOSITORS,
    images.BATCHERS,
    images.MASK_NODES,
    values.LOGIC,
    values.TEXTS,
    files.VIDEO_NODES,
    diagnostics.NODES,
)


def registry() -> Mapping[str, EngineNodeType]:
    """Returns all node types by class_type."""
    return {node.name: node for kind in KINDS for node in kind}
