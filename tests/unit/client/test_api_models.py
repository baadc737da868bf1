"""Models that the server and the client share."""

import pytest
from pydantic import TypeAdapter, ValidationError

from comfyfleet.api import account, graphs, jobs, media, pipelines
from comfyfleet.api.values import Response

ID = "7f1c6a52-0000-4000-8000-000000000001"
AT = "2026-05-01T06:00:00Z"
HOOK = {"id": ID, "url": "https://shop.example/", "created_at": AT}
MODELS = [
    each
    for module in (account, graphs, jobs, media, pipelines)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Response)
]


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.__name__)
def test_the_document_says_that_every_field_of_an_answer_is_sent(model: type[Response]) -> None:
    schema = TypeAdapter(model).json_schema(mode="serialization")
    described = schema if "properties" in schema else schema["$defs"][model.__name__]
    assert described.get("required", []) == list(model.model_fields)
    assert all("default" not in each for each in described.get("properties", {}).values())


def test_an_event_that_a_newer_server_has_added_is_let_through() -> None:
    found = account.WebhookAnswer.model_validate({**HOOK, "events": ["job.failed", "job.paused"]})
    assert found.events == ("job.failed", "job.paused")
    with pytest.raises(ValidationError):
        account.WebhookAnswer.model_validate({**HOOK, "events": [7]})
