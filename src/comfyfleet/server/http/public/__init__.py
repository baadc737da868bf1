"""The customers' API, which requires a user's key.

Internal: may change without notice.
"""

from fastapi import FastAPI

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog.service import ExampleIndex
from comfyfleet.server.http.public import (
    account,
    backends,
    effects,
    graph_reports,
    graphs,
    jobs,
    media,
    pipelines,
    progress,
    shares,
    triggers,
)
from comfyfleet.server.http.public.auth import (
    STRANGERS_AT_ONCE,
    STRANGERS_PER_SECOND,
    FetchLimiter,
    RateLimiter,
)
from comfyfleet.server.http.public.auth import authenticate_customer as authenticate_customer
from comfyfleet.server.http.streams import StreamLimiter

# The order matters. Batches come before jobs and reports before graphs, because the first segment
# of their paths would otherwise match as an id.
ROUTERS = (
    effects.router,
    effects.catalogue_router,
    media.router,
    progress.router,
    jobs.batches_router,
    jobs.router,
    backends.router,
    graph_reports.router,
    graphs.router,
    account.account_router,
    account.wallet_router,
    account.keys_router,
    account.webhooks_router,
    pipelines.router,
    shares.router,
    shares.shared_router,
    triggers.router,
    triggers.hooks_router,
)
CATALOGUE_PATH = effects.CATALOGUE_PATH
CALLED_OFTEN = jobs.CALLED_OFTEN


def install(app: FastAPI, plane: ControlPlane) -> None:
    settings = plane.settings
    app.state.rates = RateLimiter(
        "user", per_second=settings.calls_per_second, at_once=settings.calls_at_once
    )
    app.state.tenant_rates = RateLimiter(
        "tenant",
        per_second=settings.tenant_calls_per_second,
        at_once=settings.tenant_calls_at_once,
    )
    app.state.gateway_rates = (
        RateLimiter(
            "user",
            per_second=settings.gateway_calls_per_second,
            at_once=settings.gateway_calls_at_once,
        ),
        RateLimiter(
            "tenant",
            per_second=settings.gateway_tenant_calls_per_second,
            at_once=settings.gateway_tenant_calls_at_once,
        ),
    )
    app.state.webhook_tests = set()
    app.state.stranger_rates = RateLimiter(
        "address",
        per_second=STRANGERS_PER_SECOND,
        at_once=STRANGERS_AT_ONCE,
    )
    app.state.hook_rates = RateLimiter(
        "webhook",
        per_second=triggers.HOOK_CALLS_PER_SECOND,
        at_once=triggers.HOOK_CALLS_AT_ONCE,
    )
    app.state.fetches = FetchLimiter()
    app.state.examples = ExampleIndex()
    app.state.streams = StreamLimiter(
        per_key=settings.max_streams_per_key, per_user=settings.max_streams_per_user
    )
