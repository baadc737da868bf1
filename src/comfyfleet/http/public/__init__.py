"""The customers' API: effects, media, jobs, wallet, keys, webhooks, behind a user's key."""

from fastapi import FastAPI

from comfyfleet.http.public import (
    ai_jobs,
    batches,
    candidates,
    effects,
    events,
    graph_runs,
    graphs,
    keys,
    pipelines,
    uploads,
    videos,
    wallet,
    webhooks,
    workflows,
)
from comfyfleet.http.public.auth import customer_calling as customer_calling
from comfyfleet.http.public.rates import Fetches, Rates
from comfyfleet.http.public.streams import Streams
from comfyfleet.plane import Plane

# Batches stand before jobs: their paths would else be taken for a job's id.
MODULES = (
    effects,
    uploads,
    videos,
    batches,
    ai_jobs,
    events,
    workflows,
    graphs,
    graph_runs,
    wallet,
    keys,
    webhooks,
    pipelines,
    candidates,
)
ROUTERS = tuple(module.router for module in MODULES)
CALLED_OFTEN = ai_jobs.CALLED_OFTEN


def install(app: FastAPI, plane: Plane) -> None:
    settings = plane.settings
    app.state.rates = Rates(
        "user", per_second=settings.calls_per_second, at_once=settings.calls_at_once
    )
    app.state.tenant_rates = Rates(
        "tenant",
        per_second=settings.tenant_calls_per_second,
        at_once=settings.tenant_calls_at_once,
    )
    app.state.fetches = Fetches()
    app.state.streams = Streams(
        per_key=settings.max_streams_per_key, per_user=settings.max_streams_per_user
    )
