"""Decides which metadata is removed from a job's files, and how they are marked as made by AI."""

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
# Node classes that load media, including those of node packs such as VHS_LoadVideo.
_MEDIA_LOADER = re.compile(r"Load_?(Image|Video|Audio)", re.IGNORECASE)
FIXED: Mapping[AiMark, SourceType] = {
    "generated": SourceType.GENERATED,
    "edited": SourceType.EDITED,
}
LOST_MANIFEST = "remove_manifest"


class DeliveryRules(NamedTuple):
    strips: bool  # prompts and workflows are removed
    mark: SourceType | None  # added to files without a mark


def delivery_rules(asked: JobSpec, terms: RunTerms) -> DeliveryRules | None:
    """Returns the rules for a job's outputs. Returns None if outputs are delivered unchanged, as
    for operators' jobs and for jobs from the gateway.
    """
    if asked.user_id is None or asked.gateway is not None:
        return None
    rules = DeliveryRules(not terms.keeps_metadata, mark_of(asked, terms.ai_mark))
    return rules if rules.strips or rules.mark else None


def mark_of(asked: JobSpec, ai_mark: AiMark) -> SourceType | None:
    if ai_mark != "auto":
        return FIXED.get(ai_mark)
    if not generative_models(asked.prompt):
        return None
    return SourceType.EDITED if has_media_input(asked) else SourceType.GENERATED


def has_media_input(asked: JobSpec) -> bool:
    return bool(asked.assets) or any(map(_loads_media, asked.prompt.values()))


def _loads_media(node: Mapping[str, Any]) -> bool:
    return _MEDIA_LOADER.search(str(node.get("class_type", ""))) is not None


# Loaders of models that analyze media or move pixels, but don't generate anything.
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
    slug = job.asked.workflow_slug
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
        seen.discard(slug)  # retried with the next result
        log.info("the warning about %s could not be stored: %s", slug, error.message)
        return
    log.warning(
        "results of workflow %s contain a prompt or workflow and a C2PA manifest: both are removed for customers; "
        "to deliver them unchanged, set keep_metadata on its effects",
        slug,
    )
