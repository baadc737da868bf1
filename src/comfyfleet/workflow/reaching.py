"""What the output nodes of a prompt need."""

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.nodetypes import NodeTypes


def only_reachable(prompt: Prompt, types: NodeTypes) -> Prompt:
    reached = needed_by_outputs(prompt, types)
    if not reached:
        raise InvalidWorkflow("nothing would be made: the workflow has no active output node")
    return {key: entry for key, entry in prompt.items() if key in reached}


def needed_by_outputs(prompt: Prompt, types: NodeTypes) -> set[str]:
    """Ids of the output nodes and of all nodes that feed them."""
    reached = {key for key, entry in prompt.items() if _is_output(entry.get("class_type"), types)}
    pending = list(reached)
    while pending:
        for value in prompt[pending.pop()]["inputs"].values():
            if isinstance(value, list) and value[0] not in reached:
                reached.add(value[0])
                pending.append(value[0])
    return reached


def _is_output(class_type: str | None, types: NodeTypes) -> bool:
    known = types.get(class_type) if class_type else None
    return known is not None and known.is_output
