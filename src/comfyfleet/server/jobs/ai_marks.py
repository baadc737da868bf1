"""Decides which metadata to remove from a job's files, and how to mark them as AI-generated."""

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from comfyfleet.api.admin import AiMark
from comfyfleet.delivery import SourceType
from comfyfleet.errors import FleetError
from comfyfleet.server.catalog.model import HEAVY_INPUTS, RunTerms, is_heavy, models_of
from comfyfleet.server.fleets.model import ModelUse
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Job, JobSpec
from comfyfleet.server.notifications.service import find_audit_entries, record_audit

log = logging.getLogger(__name__)
# Matches node classes that load media, including classes from node packs, such as VHS_LoadVideo.
_MEDIA_LOADER = re.compile(r"Load_?(Image|Video|Audio)", re.IGNORECASE)
FIXED: Mapping[AiMark, SourceType] = {
    "generated": SourceType.GENERATED,
    "edited": SourceType.EDITED,
}
LOST_MANIFEST = "remove_manifest"


class DeliveryRules(NamedTuple):
    strips: bool  # whether prompts and workflows are removed
    mark: SourceType | None  # the AI mark that is added to files without one


def delivery_rules(spec: JobSpec, terms: RunTerms) -> DeliveryRules | None:
    """Returns the rules for a job's outputs. Returns None for operators' jobs, gateway jobs and
    other jobs whose outputs are delivered unchanged.
    """
    if spec.user_id is None or spec.gateway is not None:
        return None
    rules = DeliveryRules(not terms.keeps_metadata, mark_of(spec, terms.ai_mark))
    return rules if rules.strips or rules.mark else None


def mark_of(spec: JobSpec, ai_mark: AiMark) -> SourceType | None:
    if ai_mark != "auto":
        return FIXED.get(ai_mark)
    if not generative_models(spec.prompt):
        return None
    return SourceType.EDITED if has_media_input(spec) else SourceType.GENERATED


def has_media_input(spec: JobSpec) -> bool:
    return bool(spec.assets) or any(map(_loads_media, spec.prompt.values()))


def _loads_media(node: Mapping[str, Any]) -> bool:
    return _MEDIA_LOADER.search(str(node.get("class_type", ""))) is not None


# Matches loaders of models that analyze or transform media but don't generate it.
ANALYSIS_CLASSES = re.compile(
    r"sam\d?(?![a-z])|segm|depth|yolo|ultralytics|detect|rembg|remove.?b|birefnet|matting|face|"
    r"interrogat|caption|tagger|florence|blip|onnx|pose|rife|interpolat|upscale|clip",
    re.IGNORECASE,
)


def generative_models(prompt: Mapping[str, Any]) -> tuple[ModelUse, ...]:
    """Returns the model files of a prompt that generate media: checkpoints and diffusion models."""
    certain, likely, possible = HEAVY_INPUTS
    uses = models_of(prompt)
    return tuple(
        use
        for use in uses
        if any(is_heavy(use, tier) for tier in (certain, likely))
        or (is_heavy(use, possible) and not ANALYSIS_CLASSES.search(use.input.partition(".")[0]))
    )


async def warn_of_lost_manifest(context: JobContext, job: Job) -> None:
    """Warns the operators once per workflow that results lose their C2PA manifest."""
    slug = job.spec.workflow_slug
    seen = context.caches.lost_manifests
    if slug in seen:
        return
    seen.add(slug)
    subject = f"workflow:{slug}"
    try:
        async with context.central.transaction() as tx:
            if await find_audit_entries(tx, limit=1, action=LOST_MANIFEST, subject=subject):
                return
            await record_audit(
                tx, "system", LOST_MANIFEST, subject, context.clock(), job=str(job.id)
            )
    except FleetError as error:
        seen.discard(slug)  # lets the next result trigger the warning again
        log.info("the C2PA warning for workflow %s could not be stored: %s", slug, error.message)
        return
    log.warning(
        "the embedded workflow and the C2PA manifest are removed from results of workflow %s; "
        "to deliver its results unchanged, set keep_metadata on its effects",
        slug,
    )
