"""Registers a worker with its fleet, or reuses the key from an earlier registration."""

import asyncio
import logging
import secrets

import httpx

from comfyfleet.api.values import OutputSlot
from comfyfleet.api.worker import BackendFacts, Provider, Register, Registered
from comfyfleet.comfy import Description
from comfyfleet.errors import Conflict, FleetFull, InvalidInput, Unavailable
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.backend_facts import object_info_bytes, shared_object_info
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.journal import Journal, WorkerIdentity
from comfyfleet.worker.settings import WORKER_ID_CHARACTERS_MAX, WorkerSettings

logger = logging.getLogger(__name__)

# Seconds between attempts while the id is in use. An id becomes free when its worker has missed
# three heartbeats.
TAKEN_SECONDS = 15.0


class RegistrationClient:
    """Registers the worker. `worker_id` may differ from the configured id if that one was in
    use."""

    def __init__(
        self,
        settings: WorkerSettings,
        control: ControlClient,
        journal: Journal,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.worker_id = settings.worker_id
        self.heartbeat_seconds = settings.heartbeat_seconds
        self._settings = settings
        self._control = control
        self._journal = journal
        self._retry = retry or RetryPolicy()
        self._has_joined = False

    @property
    def provider(self) -> Provider:
        return "cloud" if self._settings.is_cloud else "self_hosted"

    def check_secret(self) -> None:
        """Raises InvalidInput if there is neither a secret nor a stored key."""
        identity = self._journal.identity()
        if not self._settings.secret and (identity is None or not self._is_ours(identity)):
            raise InvalidInput(
                "the fleet's secret is not set",
                hint="Run `export COMFYFLEET_FLEET_SECRET=…` with the secret that "
                "`comfyfleet admin fleets create` printed.",
            )

    def take_up(self) -> bool:
        """Loads the stored key. Returns whether there is one."""
        identity = self._journal.identity()
        if identity is None or not self._is_ours(identity):
            return False
        self._control.key, self.worker_id = identity.key, identity.worker_id
        self._has_joined = True
        self._apply_answer(identity.heartbeat_seconds)
        return True

    async def register(self, facts: BackendFacts | None) -> Registered:
        """Registers the worker. Retries until the fleet has room for it.

        Raises Unauthenticated and InvalidInput, because retrying can't fix these.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                registered = await self._control.register(
                    self._message(facts), self._settings.secret
                )
                break
            except Conflict as error:
                await self._handle_taken_id(error)
            except (FleetFull, Unavailable) as error:
                level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
                logger.log(level, "not registered yet", extra={"reason": error.message})
                await self._retry.back_off(min(attempt, 6))
        self.worker_id = registered.worker_id
        self._has_joined = True
        self._apply_answer(registered.heartbeat_seconds)
        await asyncio.to_thread(self._remember, self._identity(registered))
        workflows = list(registered.workflows_assigned)
        logger.info("registered", extra={"worker_id": self.worker_id, "workflows": workflows})
        if not workflows:
            logger.warning("no workflow is assigned to this fleet, so there will be no jobs")
        return registered

    def take_new_key(self, key: str) -> None:
        """Stores a new key and then uses it. The key is stored first, because its first use
        invalidates the old one."""
        identity = self._journal.identity()
        if identity is not None and not self._remember(identity.model_copy(update={"key": key})):
            return  # The control plane sends the key again with its next response.
        self._control.key = key
        logger.info("switched to a new key", extra={"worker_id": self.worker_id})

    def _remember(self, identity: WorkerIdentity) -> bool:
        """Stores the key. Returns False if it can't be written. In that case, the worker registers
        again at its next start."""
        try:
            self._journal.remember(identity)
        except OSError as error:
            logger.warning("the worker's key can't be stored", extra={"reason": str(error)})
            return False
        return True

    def _apply_answer(self, seconds: float) -> None:
        """Adopts the control plane's heartbeat interval if it is shorter than the worker's own."""
        self.heartbeat_seconds = min(self._settings.heartbeat_seconds, seconds)
        self._control.heartbeat_seconds = self.heartbeat_seconds

    async def _handle_taken_id(self, error: Conflict) -> None:
        if self._settings.is_default_id and not self._has_joined:
            # The default id may belong to a worker on another machine, so another id is tried. A
            # worker that has registered before keeps its id, because operators' decisions refer to
            # it.
            room = WORKER_ID_CHARACTERS_MAX - 7
            self.worker_id = f"{self._settings.worker_id[:room]}-{secrets.token_hex(3)}"
            return
        logger.warning(
            "the id is taken; retrying until it is free",
            extra={"worker_id": self.worker_id, "reason": error.message},
        )
        await self._retry.sleep(TAKEN_SECONDS)

    def _message(self, facts: BackendFacts | None) -> Register:
        settings = self._settings
        return Register(
            worker_id=self.worker_id,
            fleet_slug=settings.fleet_slug,
            stage=settings.stage,
            max_concurrency=settings.max_concurrency,
            capabilities=settings.capabilities,
            workflow_slugs=settings.workflow_slugs or None,
            providers=(self.provider,),
            backend=facts,
        )

    def _identity(self, registered: Registered) -> WorkerIdentity:
        settings = self._settings
        return WorkerIdentity(
            control=settings.control_url,
            fleet_slug=settings.fleet_slug,
            stage=settings.stage,
            worker_id=registered.worker_id,
            key=registered.token,
            heartbeat_seconds=registered.heartbeat_seconds,
            asked_id=settings.worker_id,
        )

    def _is_ours(self, identity: WorkerIdentity) -> bool:
        settings = self._settings
        place = (identity.control, identity.fleet_slug, identity.stage)
        ids = (identity.worker_id, identity.asked_id)
        same_id = settings.is_default_id or settings.worker_id in ids
        return same_id and place == (settings.control_url, settings.fleet_slug, settings.stage)


def _upload_text(description: Description) -> bytes:
    return object_info_bytes(shared_object_info(description.object_info))


async def upload_object_info(
    store: httpx.AsyncClient, slot: OutputSlot, description: Description
) -> None:
    """Uploads the node types, which the control plane uses to convert workflows. Jobs run even if
    the upload fails."""
    data = await asyncio.to_thread(_upload_text, description)
    try:
        answer = await store.put(slot.url, content=data, headers=slot.headers)
    except httpx.TransportError as error:
        logger.warning("object_info was not uploaded", extra={"reason": type(error).__name__})
        return
    # The upload is refused with 429 while other workers of the fleet are uploading the same data.
    if not answer.is_success and answer.status_code != 429:
        logger.warning("object_info was not uploaded", extra={"reason": answer.status_code})
