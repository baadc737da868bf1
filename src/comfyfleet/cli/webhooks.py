"""`comfyfleet webhooks`: lists webhooks and sends test messages, through the public API."""

from functools import partial
from typing import Annotated
from uuid import UUID

from cyclopts import App, Parameter

from comfyfleet.cli import help_texts
from comfyfleet.cli.context import InjectedContext
from comfyfleet.cli.control_plane import API_DEFAULTS, PUBLIC_BASE, ApiOptions, connect
from comfyfleet.cli.tables import print_json, print_rows
from comfyfleet.errors import RunFailed

app = App(name="webhooks", help=help_texts.WEBHOOKS, help_format="markdown")
control = partial(connect, base=PUBLIC_BASE)
COLUMNS = ("id", "url", "is_active", "created_at")
WebhookId = Annotated[UUID, Parameter(metavar="WEBHOOK", help="The webhook's id.")]


@app.command(name="list")
def list_webhooks(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """List your webhooks, without their secrets."""
    with control(options, context) as plane:
        webhooks = plane.run(plane.client.webhooks.all())
    rows = [webhook.model_dump(mode="json", exclude={"secret"}) for webhook in webhooks]
    if options.as_json:
        print_json({"webhooks": rows}, context)
    else:
        print_rows(rows, COLUMNS, context, none="there are no webhooks")


@app.command(name="test")
def send_test(
    webhook: WebhookId, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Send a signed test message to a webhook. Exits with code 1 if the message was not
    accepted."""
    with control(options, context) as plane:
        answer = plane.run(plane.client.webhooks.test(webhook))
    if options.as_json:
        print_json(answer, context)
    elif answer.is_delivered:
        context.say(f"delivered: the receiver responded with {answer.status}")
    if not answer.is_delivered:
        why = answer.error or f"the receiver responded with {answer.status}"
        raise RunFailed(f"not delivered: {why}")
