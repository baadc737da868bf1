"""What operators set for prompts of ComfyUI's clients, for each fleet and each tenant."""

from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator

from comfyfleet.api.values import Message

PATTERNS_MAX = 500
FLEETS_MAX = 1_000
PREFIXES_MAX = 20
NODES_MAX = 2_000
NODES_LIMIT_MAX = 100_000
PROMPT_BYTES_MAX = 4 * 1024**2
PROMPT_BYTES_LIMIT_MAX = 64 * 1024**2
RUN_LIMIT_SECONDS = 3_600
RUN_LIMIT_SECONDS_MAX = 7 * 24 * 3_600
PRICE_TOKENS_MAX = 1_000_000_000

# As in a shell: * any characters, ? one, [abc] one of these. Case counts.
TypePattern: TypeAlias = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
TypePatterns: TypeAlias = Annotated[tuple[TypePattern, ...], Field(max_length=PATTERNS_MAX)]
FleetName: TypeAlias = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,59}/[a-z0-9][a-z0-9_-]{0,29}$")
]
# Whole segments only: /api/etn is /api/etn and /api/etn/..., not /api/etnx. No dots: they could lead out of it.
RoutePrefix: TypeAlias = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_-]{1,60}){1,6}$")]


class FleetPrompts(Message):
    """The terms on which a fleet runs prompts of no registered workflow."""

    is_open: bool = Field(default=True, description="Whether it takes such prompts.")
    price_tokens: int = Field(
        default=0, ge=0, le=PRICE_TOKENS_MAX, description="The price of each prompt, in tokens."
    )
    price_per_second: float | None = Field(
        default=None,
        gt=0,
        le=PRICE_TOKENS_MAX,
        allow_inf_nan=False,
        description="Instead of a fixed price: tokens for each second on the GPU.",
    )
    allow: TypePatterns = Field(
        default=(), description="Node types that may run although they are denied by default."
    )
    deny: TypePatterns = Field(
        default=(), description="Node types that may not run; stronger than any `allow`."
    )
    allows_unknown: bool = Field(
        default=False,
        description="Whether node types that are not ComfyUI's own may run, unless they take a path, "
        "a URL, code or a command.",
    )
    nodes_max: int = Field(
        default=NODES_MAX, ge=1, le=NODES_LIMIT_MAX, description="Most nodes of a prompt."
    )
    prompt_bytes_max: int = Field(
        default=PROMPT_BYTES_MAX,
        ge=1_000,
        le=PROMPT_BYTES_LIMIT_MAX,
        description="Most bytes of a prompt, as JSON.",
    )
    run_limit_seconds: int = Field(
        default=RUN_LIMIT_SECONDS,
        ge=1,
        le=RUN_LIMIT_SECONDS_MAX,
        description="A run that takes longer is stopped, and failed.",
    )
    passthrough: Annotated[tuple[RoutePrefix, ...], Field(max_length=PREFIXES_MAX)] = Field(
        default=(),
        description="Prefixes of routes that are passed on to a worker's backend, such as /api/etn.",
    )

    @model_validator(mode="after")
    def _require_one_price(self) -> Self:
        if self.price_tokens and self.price_per_second is not None:
            raise ValueError("a price is fixed (price_tokens) or per second, not both")
        return self


class TenantPrompts(Message):
    """What a tenant's prompts may use, of what the fleets allow."""

    fleets: Annotated[tuple[FleetName, ...], Field(max_length=FLEETS_MAX)] | None = Field(
        default=None, description="As SLUG/STAGE; null: all fleets that take prompts."
    )
    allow: TypePatterns = Field(
        default=(), description="Node types that its prompts may use on any of its fleets."
    )
    deny: TypePatterns = Field(default=(), description="Node types that they may not use.")
