"""`comfyfleet admin workflows | effects`: the workflows and effects that jobs can use."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from comfyfleet.api.admin import PROPERTY_TYPES
from comfyfleet.cli.context import (
    FILE_HELP,
    CliContext,
    InjectedContext,
    open_file,
    read_file,
    read_structure,
)
from comfyfleet.cli.control_plane import API_DEFAULTS, ApiOptions, ApiSession, connect
from comfyfleet.cli.tables import print_fields, print_json, print_rows
from comfyfleet.cli.upload import parse_values
from comfyfleet.errors import InvalidInput
from comfyfleet.workflow.embedded import parse_json

workflows_app = App(
    name="workflows", help="Workflows that jobs can name: register, pause, activate."
)
WorkflowSlug = Annotated[str, Parameter(help="The workflow's slug.")]
PROPERTIES_BYTES_MAX = 4 * 1024 * 1024
WORKFLOW_COLUMNS = (
    "slug",
    "version",
    "active:is_active",
    "paused:is_paused",
    "price:price_tokens",
    "fleets",
    "created:created_at",
)
WORKER_COLUMNS = (
    "worker:worker_id",
    "fleet",
    "can run:can_run",
    "missing nodes:node_types",
    "missing models:models",
    "missing capabilities:capabilities",
)
PROPERTY_COLUMNS = ("name", "type", "binding", "placeholder", "default", "required", "description")
PROPERTY_HELP = (
    "NAME:TYPE=NODE.INPUT, such as prompt:text=6.text or input:image=Photo.image; NODE is an id or a title. "
    "TYPE is text, number, integer, boolean, choice, seed, image, video or audio. Repeatable."
)

FROM_HELP = (
    "A file (YAML or JSON) that describes several workflows: for each slug its file, properties, "
    "output_node_id, price_tokens. With SLUG only that one is registered."
)
FROM_FIELDS = frozenset(
    {
        "file",  # default: workflows/SLUG.json or SLUG.json in the same folder
        "properties",
        "output_node_id",
        "required_capabilities",
        "run_limit_seconds",
        "price_tokens",
        "output",
        "ai_mark",
        "fleet",
        "break_effects",
    }
)


OutputOption = Annotated[
    Literal["required", "optional"] | None,
    Parameter(help="Whether a job must produce a file or a value."),
]
AiMarkOption = Annotated[
    Literal["auto", "generated", "edited", "none"] | None,
    Parameter(
        help="How result files are marked as AI-generated. auto decides based on the prompt."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class WorkflowTermsOptions:
    """The options that apply to a workflow as a whole."""

    output: Annotated[
        str | None, Parameter(metavar="NODE", help="The node whose files are the result.")
    ] = None
    capability: Annotated[
        tuple[str, ...],
        Parameter(help="A capability that the workflow requires of workers. Repeatable."),
    ] = ()
    run_limit: Annotated[int | None, Parameter(metavar="SECONDS", help="Time limit of a job.")] = (
        None
    )
    price: Annotated[
        int | None,
        Parameter(
            metavar="TOKENS",
            help="Offer the workflow in graphs and pipelines at this price. 0 means free.",
        ),
    ] = None
    output_rule: OutputOption = None
    ai_mark: AiMarkOption = None
    break_effects: Annotated[
        bool,
        Parameter(
            help="Accept the version even if it breaks published effects, which then refuse jobs."
        ),
    ] = False

    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "output_node_id": self.output,
            "required_capabilities": sorted(self.capability) or None,
            "run_limit_seconds": self.run_limit,
            "price_tokens": self.price,
            "output": self.output_rule,
            "ai_mark": self.ai_mark,
            "break_effects": self.break_effects or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


NO_TERMS = WorkflowTermsOptions()


@workflows_app.command(name="list")
def list_workflows(*, options: ApiOptions = API_DEFAULTS, context: InjectedContext) -> None:
    """List all registered workflows."""
    none = "there are no workflows yet: comfyfleet admin workflows register SLUG FILE"
    with connect(options, context) as plane:
        plane.tell_rows(plane.get("workflows"), "workflows", WORKFLOW_COLUMNS, none=none)


@workflows_app.command(name="show")
def show_workflow(
    slug: WorkflowSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show a workflow: its versions, properties and requirements."""
    with connect(options, context) as plane:
        answer = plane.get("workflows", slug)
    if options.as_json:
        print_json(answer, context)
        return
    properties = answer.pop("properties", [])
    print_fields(answer, context)
    if properties:
        context.out.print()
        print_rows(properties, PROPERTY_COLUMNS, context, none="")


@workflows_app.command
def workers(
    slug: WorkflowSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """List the workers in the workflow's fleets and their missing requirements."""
    with connect(options, context) as plane:
        answer = plane.get("workflows", slug, "workers")
    if options.as_json:
        print_json(answer, context)
        return
    rows = [{**worker, **worker["missing"]} for worker in answer["workers"]]
    none = f"no worker is in a fleet that runs {slug}: comfyfleet admin fleets assign"
    print_rows(rows, WORKER_COLUMNS, context, none=none)


@workflows_app.command
def register(
    slug: Annotated[str | None, Parameter(help="The workflow's slug.")] = None,
    file: Annotated[str | None, Parameter(help=FILE_HELP, allow_leading_hyphen=True)] = None,
    /,
    *,
    property_: Annotated[
        tuple[str, ...],
        Parameter(name="--property", metavar="NAME:TYPE=NODE.INPUT", help=PROPERTY_HELP),
    ] = (),
    properties: Annotated[
        Path | None,
        Parameter(metavar="JSON", help="A file that lists the properties with all their fields."),
    ] = None,
    from_: Annotated[
        Path | None,
        Parameter(name="--from", metavar="YAML", help=FROM_HELP),
    ] = None,
    needs: WorkflowTermsOptions = NO_TERMS,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Register a workflow or a new version of it, from any file saved by ComfyUI.

    ```
    comfyfleet admin workflows register soften soften.json --property input:image=1.image
    comfyfleet admin workflows register --from examples/properties.yaml
    ```
    """
    if from_ is not None:
        if file or property_ or properties or needs != NO_TERMS:
            raise InvalidInput(
                "--from describes a workflow completely and can't be combined with other options"
            )
        bodies = read_registrations(from_, slug, context)
    elif slug is None or file is None:
        raise InvalidInput(
            "specify the workflow's slug and file, or --from with a file of several workflows"
        )
    else:
        named = [*_from_file(properties), *map(parse_property, property_)]
        bodies = [{"slug": slug, **needs.body(), **_document(file, context), "properties": named}]
    with connect(options, context) as plane:
        answers = [plane.post("workflows", **body) for body in bodies]
    if options.as_json:
        print_json(answers[0] if from_ is None else {"workflows": answers}, context)
        return
    for answer in answers:
        _registered(answer, context)


def _document(file: str, context: CliContext) -> dict[str, Any]:
    opened = open_file(file, context.stdin)
    for note in opened.notes:
        context.warn(note)
    return {"document": opened.workflow or opened.prompt}


def read_registrations(path: Path, only: str | None, context: CliContext) -> list[dict[str, Any]]:
    """Reads a file that describes several workflows. Returns their request bodies."""
    entries = read_structure(path)
    if not isinstance(entries, dict) or not entries:
        raise InvalidInput(f"{path} must map workflow slugs to their descriptions")
    if only is not None and only not in entries:
        close = difflib.get_close_matches(only, map(str, entries)) or sorted(map(str, entries))
        raise InvalidInput(f"{path} has no workflow {only}; it has {', '.join(close)}")
    return [
        _registration(path, str(slug), entry, context)
        for slug, entry in entries.items()
        if only in (None, slug)
    ]


def _registration(path: Path, slug: str, entry: Any, context: CliContext) -> dict[str, Any]:
    fields = {} if entry is None else entry
    if not isinstance(fields, dict):
        raise InvalidInput(f"{path}: {slug} must be an object with properties")
    unknown = sorted(map(str, fields.keys() - FROM_FIELDS))
    if unknown:
        known = ", ".join(sorted(FROM_FIELDS))
        raise InvalidInput(f"{path}: {slug} has the unknown field {unknown[0]}; use {known}")
    named = (
        [str(fields["file"])] if "file" in fields else [f"workflows/{slug}.json", f"{slug}.json"]
    )
    beside = [path.parent / name for name in named]
    file = next((candidate for candidate in beside if candidate.is_file()), beside[0])
    rest = {name: value for name, value in fields.items() if name != "file"}
    return {"slug": slug, **rest, **_document(str(file), context)}


@workflows_app.command
def offer(
    slug: WorkflowSlug,
    /,
    *,
    price: Annotated[int, Parameter(metavar="TOKENS", help="The price of a job. 0 means free.")],
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Let customers use a workflow in graphs and pipelines, at a price."""
    with connect(options, context) as plane:
        answer = plane.patch("workflows", slug, price_tokens=price)
    plane.tell(answer, f"workflow {slug} is offered at {price} tokens")


@workflows_app.command(name="withdraw")
def withdraw_workflow(
    slug: WorkflowSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Stop offering a workflow. Its effects and active graph runs are not affected."""
    with connect(options, context) as plane:
        answer = plane.patch("workflows", slug, is_withdrawn=True)
    plane.tell(answer, f"workflow {slug} is no longer offered")


@workflows_app.command(name="change")
def change_workflow(
    slug: WorkflowSlug,
    /,
    *,
    output_rule: OutputOption = None,
    ai_mark: AiMarkOption = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Change the settings of a workflow without a new version."""
    options_by_field = {"output": output_rule, "ai_mark": ai_mark}
    changes = {name: value for name, value in options_by_field.items() if value is not None}
    if not changes:
        raise InvalidInput("specify what to change: --output-rule or --ai-mark")
    with connect(options, context) as plane:
        answer = plane.patch("workflows", slug, **changes)
    plane.tell(answer, f"workflow {slug} was changed")


@workflows_app.command
def activate(
    slug: WorkflowSlug,
    /,
    *,
    version: Annotated[int | None, Parameter(help="The version for new jobs.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Make a workflow, or another version of it, available to new jobs."""
    body = {} if version is None else {"version": version}
    with connect(options, context) as plane:
        plane.tell(plane.post("workflows", slug, "activate", **body), f"workflow {slug} is active")


@workflows_app.command
def deactivate(
    slug: WorkflowSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Stop accepting new jobs for a workflow. Queued jobs wait until it is active again."""
    with connect(options, context) as plane:
        plane.tell(plane.post("workflows", slug, "deactivate"), f"workflow {slug} is not active")


@workflows_app.command
def pause(
    slug: WorkflowSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Stop giving jobs of a workflow to workers. Running jobs finish."""
    with connect(options, context) as plane:
        plane.tell(plane.post("workflows", slug, "pause"), f"workflow {slug} is paused")


@workflows_app.command
def resume(
    slug: WorkflowSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Start giving jobs of a paused workflow to workers again."""
    with connect(options, context) as plane:
        plane.tell(plane.post("workflows", slug, "resume"), f"workflow {slug} is resumed")


def parse_property(text: str) -> dict[str, str]:
    name, colon, rest = text.partition(":")
    kind, equals, binding = rest.partition("=")
    if not (name and colon and kind and equals and binding):
        raise InvalidInput(
            f"--property {text!r} must be NAME:TYPE=NODE.INPUT, such as prompt:text=6.text",
            hint="Show the inputs of a workflow and their names with: comfyfleet inspect FILE",
        )
    if kind.strip() not in PROPERTY_TYPES:
        close = difflib.get_close_matches(kind.strip(), PROPERTY_TYPES, n=1)
        raise InvalidInput(
            f"--property {text!r}: unknown type {kind.strip()}; use one of {', '.join(PROPERTY_TYPES)}",
            **({"hint": f"Did you mean {close[0]}?"} if close else {}),
        )
    return {"name": name.strip(), "type": kind.strip(), "binding": binding.strip()}


def _from_file(path: Path | None) -> list[Any]:
    if path is None:
        return []
    properties = parse_json(read_file(path, bytes_max=PROPERTIES_BYTES_MAX), what=str(path))
    if not isinstance(properties, list):
        raise InvalidInput(
            f"{path} must be a list of properties",
            hint=json.dumps([{"name": "prompt", "type": "text", "binding": "6.text"}]),
        )
    return properties


def _registered(answer: dict[str, Any], context: CliContext) -> None:
    for warning in answer.get("warnings", ()):
        context.warn(warning)
    for note in answer.get("notes", ()):
        context.say(note)
    context.say(f"workflow {answer['slug']} has version {answer['version']}")


effects_app = App(
    name="effects", help="Effects that customers choose: workflows with a price and preset values."
)
EffectSlug = Annotated[str, Parameter(help="The effect's slug.")]
EFFECT_COLUMNS = (
    "slug",
    "workflow:workflow_slug",
    "price:price_tokens",
    "published",
    "typical_seconds",
    "title",
)


@Parameter(name="*")
@dataclass(frozen=True)
class EffectFields:
    """The fields of an effect. Omitted fields don't change."""

    title: Annotated[
        str | None, Parameter(help="The title that customers see. Default: the slug.")
    ] = None
    description: Annotated[str | None, Parameter(help="The description that customers see.")] = None
    preview_url: Annotated[
        str | None, Parameter(metavar="URL", help="An image or video of the result.")
    ] = None
    price: Annotated[int | None, Parameter(metavar="TOKENS", help="The price of a job.")] = None
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NAME=VALUE",
            help="Override the workflow's default for a property. Repeatable.",
        ),
    ] = ()
    lock: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME", help="A property that customers can't see or set. Repeatable."),
    ] = ()
    stage: Annotated[str | None, Parameter(help="The stage of the fleets that run it.")] = None
    provider: Annotated[
        Literal["self_hosted", "cloud"] | None, Parameter(help="The kind of backend that runs it.")
    ] = None
    max_upload: Annotated[
        int | None, Parameter(metavar="BYTES", help="The maximum size of uploads.")
    ] = None
    media_type: Annotated[
        tuple[str, ...],
        Parameter(
            help="An accepted type, such as image/png. Default: all types of its kind. Repeatable."
        ),
    ] = ()

    keep_metadata: Annotated[
        bool | None,
        Parameter(
            negative="--no-keep-metadata",
            help="Keep the prompt and workflow in the result files, or remove them.",
        ),
    ] = None
    reuse: Annotated[
        bool | None,
        Parameter(
            negative="--no-reuse",
            help="Return an identical result that the customer already has, free of charge, or always run the job.",
        ),
    ] = None

    def body(self, plane: ApiSession, workflow: str) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "title": self.title,
            "description": self.description,
            "preview_url": self.preview_url,
            "price_tokens": self.price,
            "locked": list(self.lock) or None,
            "stage": self.stage,
            "provider": self.provider,
            "max_upload_bytes": self.max_upload,
            "media_types": list(self.media_type) or None,
            "keep_metadata": self.keep_metadata,
            "reuse": self.reuse,
        }
        if self.set_:
            properties = plane.get("workflows", workflow)["properties"]
            fields["overrides"] = parse_values(self.set_, properties, workflow)
        return {name: value for name, value in fields.items() if value is not None}


NO_FIELDS = EffectFields()


@effects_app.command(name="list")
def list_effects(
    *,
    workflow: Annotated[str | None, Parameter(help="Only effects of this workflow.")] = None,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """List all effects, published or not."""
    none = "there are no effects yet: comfyfleet admin effects create SLUG WORKFLOW"
    with connect(options, context) as plane:
        answer = plane.get("effects", workflow=workflow)
    plane.tell_rows(answer, "effects", EFFECT_COLUMNS, none=none)


@effects_app.command(name="show")
def show_effect(
    slug: EffectSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Show an effect: its price, values and typical duration."""
    with connect(options, context) as plane:
        answer = plane.get("effects", slug)
    if options.as_json:
        print_json(answer, context)
    else:
        print_fields(answer, context)


@effects_app.command
def create(
    slug: EffectSlug,
    workflow: Annotated[str, Parameter(help="The slug of its workflow.")],
    /,
    *,
    publish_: Annotated[
        bool, Parameter(name="--publish", help="Publish the effect immediately.")
    ] = False,
    fields: EffectFields = NO_FIELDS,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Create an effect from a registered workflow."""
    with connect(options, context) as plane:
        body = fields.body(plane, workflow)
        answer = plane.post(
            "effects", slug=slug, workflow_slug=workflow, published=publish_, **body
        )
    seen = (
        "is published"
        if publish_
        else f"is created; publish it with: comfyfleet admin effects publish {slug}"
    )
    plane.tell(answer, f"effect {slug} ({answer['id']}) {seen}")


@effects_app.command
def change(
    slug: EffectSlug,
    /,
    *,
    fields: EffectFields = NO_FIELDS,
    options: ApiOptions = API_DEFAULTS,
    context: InjectedContext,
) -> None:
    """Change only the given fields. --set replaces all existing values."""
    if fields == NO_FIELDS:
        raise InvalidInput(
            "specify at least one field to change",
            hint="List the fields with: comfyfleet admin effects change --help",
        )
    with connect(options, context) as plane:
        workflow = plane.get("effects", slug)["workflow_slug"]
        answer = plane.patch("effects", slug, **fields.body(plane, workflow))
    plane.tell(answer, f"effect {slug} was changed; submitted jobs are not affected")


@effects_app.command
def publish(
    slug: EffectSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Let customers see and use an effect."""
    with connect(options, context) as plane:
        plane.tell(plane.post("effects", slug, "publish"), f"effect {slug} is published")


@effects_app.command(name="withdraw")
def withdraw_effect(
    slug: EffectSlug, /, *, options: ApiOptions = API_DEFAULTS, context: InjectedContext
) -> None:
    """Remove an effect from the catalog. Jobs already submitted are not affected."""
    with connect(options, context) as plane:
        plane.tell(plane.post("effects", slug, "withdraw"), f"effect {slug} is withdrawn")
