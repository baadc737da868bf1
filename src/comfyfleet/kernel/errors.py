"""Our errors, each with a stable code. Only edges translate them (exit codes, HTTP statuses).

FleetError
 ├─ InvalidInput          what was given can't be used; the message names the field, node or file
 │   ├─ InvalidWorkflow   a workflow or prompt document is broken; carries the place
 │   ├─ InvalidValue      a value doesn't fit its input
 │   └─ NoWorkflowFound   the file holds no workflow; says what was found instead
 ├─ LimitExceeded         larger, deeper or longer than we accept
 ├─ UnknownNodeTypes      the server lacks node types that the workflow needs
 ├─ NodeFailed            a node of the built-in engine could not do its work
 ├─ Interrupted           the run was cancelled while a node was at work
 └─ ServerUnavailable     a server we asked did not answer as one
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class FleetError(Exception):
    """Base of everything that we raise on purpose."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = details


class InvalidInput(FleetError):
    code = "invalid_input"


class InvalidWorkflow(InvalidInput):
    code = "invalid_workflow"


class InvalidValue(InvalidInput):
    code = "invalid_value"


class NoWorkflowFound(InvalidInput):
    code = "no_workflow_found"


class LimitExceeded(FleetError):
    code = "limit_exceeded"


class UnknownNodeTypes(FleetError):
    code = "unknown_node_types"


class NodeFailed(FleetError):
    code = "node_failed"


class Interrupted(FleetError):
    code = "interrupted"


class ServerUnavailable(FleetError):
    code = "server_unavailable"
