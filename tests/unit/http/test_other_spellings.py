"""Fields of request bodies under the names that other services use."""

from typing import Any

import pytest
from pydantic import ValidationError

from comfyfleet.server.http.admin.catalog import FaceBody, NewEffect, NewWorkflow
from comfyfleet.server.http.public.media import NewUpload, NewVideo
from comfyfleet.server.http.request_body import Body

WORKFLOW: dict[str, Any] = {"slug": "copy", "document": {}}
FILE_ID = "6cc60ec3-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("kind", "other", "ours"),
    [
        (
            NewUpload,
            {"filename": "a.png", "mime_type": "image/png", "size": 1},
            {"filename": "a.png", "content_type": "image/png", "size": 1},
        ),
        (
            NewEffect,
            {"slug": "copy", "workflow_id": "copy", "credits_cost": 3, "is_active": True},
            {"slug": "copy", "workflow_slug": "copy", "price_tokens": 3, "published": True},
        ),
        (NewWorkflow, {**WORKFLOW, "is_active": False}, {**WORKFLOW, "is_withdrawn": True}),
        (NewWorkflow, {**WORKFLOW, "is_active": True}, WORKFLOW),
        (
            NewWorkflow,
            {
                "slug": "copy",
                "api_json": {"1": {}},
                "exposed_parameters": [
                    {"node_id": 1, "field_name": "image", "param_type": "IMAGE_PATH"},
                    {"name": "words", "node_id": "2", "field_name": "text", "type": "text"},
                ],
            },
            {
                "slug": "copy",
                "document": {"1": {}},
                "properties": [
                    {"name": "image", "binding": "1.image", "type": "image"},
                    {"name": "words", "binding": "2.text", "type": "text"},
                ],
            },
        ),
        (NewVideo, {"file_id": FILE_ID, "original_file_id": FILE_ID}, {"file_id": FILE_ID}),
    ],
)
def test_other_names_of_fields_are_accepted(
    kind: type[Body], other: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert kind.model_validate(other).model_dump() == kind.model_validate(ours).model_dump()


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (
            NewVideo,
            {"file_id": FILE_ID, "original_file_id": FILE_ID.replace("6", "7")},
            "'file_id' and 'original_file_id' are the same field; send only 'file_id'",
        ),
        (
            FaceBody,
            {"processing": 3, "titel": "A", "credit_cost": 4},
            "unknown field 'titel'; did you mean 'title'? "
            "Unknown field 'credit_cost'; did you mean 'price_tokens'? "
            "Unknown field 'processing'; use title, description",
        ),
        (
            NewUpload,
            {"one": 1, "two": 2},
            "unknown fields 'one', 'two'; use filename, content_type, size",
        ),
    ],
)
def test_an_error_names_all_fields_that_are_not_known(
    kind: type[Body], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    (error,) = refused.value.errors()
    assert error["msg"].startswith(message)
