"""What nodes of graphs and steps of pipelines may name, with its properties."""

from typing import Any, Literal

from pydantic import Field

from comfyfleet.effects.model import Property
from comfyfleet.graphs.catalogue import WorkflowFacts
from comfyfleet.graphs.offers import all_offered
from comfyfleet.graphs.plan import must_be_given
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.public.auth import Reader
from comfyfleet.http.public.routing import Answer, public_router

router = public_router("graphs")


class OfferedProperty(Answer):
    name: str
    type: str = Field(examples=["image"])
    default: Any = Field(description="null: none that can be told.")
    minimum: float | None
    maximum: float | None
    step: float | None
    choices: list[Any] | None
    required: bool = Field(description="It must be set, or connected.")
    description: str


class WorkflowOffer(Answer):
    kind: Literal["effect", "workflow"] = Field(description="The field that names it.")
    name: str
    version: int = Field(description="The one that a node gets if it names none.")
    price_tokens: int
    typical_seconds: float | None = Field(description="null: nobody has timed it yet.")
    properties: list[OfferedProperty]


class WorkflowOffers(Answer):
    workflows: list[WorkflowOffer] = Field(description="Effects first, by name.")


@router.get("/workflows")
async def list_offered(plane: GivenPlane, _: Reader) -> WorkflowOffers:
    """Published effects, and workflows that are offered as they are."""
    async with plane.central.look() as tx:
        found = await all_offered(tx)
    return WorkflowOffers(workflows=[_offer(each) for each in found])


def _offer(facts: WorkflowFacts) -> WorkflowOffer:
    return WorkflowOffer(
        kind="effect" if facts.effect else "workflow",
        name=facts.name,
        version=facts.version,
        price_tokens=facts.price_tokens,
        typical_seconds=facts.typical_seconds,
        properties=[_property(each) for each in facts.properties],
    )


def _property(each: Property) -> OfferedProperty:
    return OfferedProperty(
        name=each.name,
        type=each.type,
        # A default for a file names one that the backend has, which is nobody's business.
        default=None if each.is_media else each.default,
        minimum=each.minimum,
        maximum=each.maximum,
        step=each.step,
        choices=list(each.choices) if each.choices is not None else None,
        required=must_be_given(each),
        description=each.description,
    )
