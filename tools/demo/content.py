"""Creates the demo's sample data, over HTTP only, like operators and customers."""

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import numpy as np
import yaml
from PIL import Image

from comfyfleet.client import Client
from comfyfleet.client.files import upload_source, upload_to
from comfyfleet.client.jobs import JobHandle
from comfyfleet.errors import FleetError
from demo import catalogue, scenes
from demo.catalogue import EFFECTS, LARGE_FORMAT, Shown
from demo.processes import Processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
START_SECONDS_MAX = 60
STEP_SECONDS_MAX = 120
LOOK_SECONDS = 0.2
TOKENS = 500
STUDIO_TOKENS = 100_000
STUDIO = "studio"
BASE_CANDIDATES = 8
BATCH = 4
CONCURRENT_JOBS = 4  # a user may have five active jobs
LONG_STEPS = 400  # each step takes one second
BUSY_SECONDS = 8
BUSY_HOURS_MAX = 2
EXAMPLE_QUALITY = 86
Say = Callable[[str], None]  # prints one line of progress


@dataclass(frozen=True)
class Media:
    """A user's media. `pictures` contains the images by the names of their scenes."""

    pictures: Mapping[str, Any]
    clip: Any
    mask: Any


@dataclass
class Content:
    """The sample data that was created, with the ids that occur in URLs of pages."""

    url: str
    admin_key: str
    customer_key: str = ""
    tenant_id: str = ""
    media_id: str = ""
    done_id: str = ""
    failed_id: str = ""
    running_id: str = ""
    shared_url: str = ""
    graph_id: str = ""
    graph_run_id: str = ""
    asking_run_id: str = ""
    pipeline_id: str = ""
    pipeline_run_id: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    workers: Sequence[str] = ()
    candidates: int = 0


@dataclass(frozen=True)
class Admin:
    """Calls the admin API."""

    http: httpx.AsyncClient

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        response = await self.http.request(method, path, json=body)
        return _answer(response, path)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        return await self.call("POST", path, body)

    async def send(self, path: str, content: bytes, content_type: str) -> dict[str, Any]:
        headers = {"Content-Type": content_type}
        return _answer(await self.http.put(path, content=content, headers=headers), path)


def _answer(response: httpx.Response, path: str) -> dict[str, Any]:
    if not response.is_success:
        raise FleetError(f"{path}: {response.text}")
    answer: dict[str, Any] = response.json() if response.content else {}
    return answer


class Demo:
    """Creates the sample data of a control plane in the order of its dependencies."""

    def __init__(self, processes: Processes, say: Say) -> None:
        self.processes = processes
        self.say = say
        self.content = Content(processes.url, processes.admin_key)
        self.customer: Client
        self.studio: Client
        self.admin: Admin
        self.secret = ""
        self._stack = AsyncExitStack()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Demo"]:
        async with self._stack:
            headers = {"Authorization": f"Bearer {self.processes.admin_key}"}
            http = httpx.AsyncClient(
                base_url=f"{self.content.url}/api/admin", headers=headers, timeout=60
            )
            self.admin = Admin(await self._stack.enter_async_context(http))
            await until(self._answers, "the control plane to respond", START_SECONDS_MAX)
            yield self

    async def _answers(self) -> bool:
        if name := self.processes.ended():
            end = self.processes.log_end(name)
            raise FleetError(f"{name} stopped unexpectedly. Its log ends with: {end}")
        try:
            return (await self.admin.http.get(f"{self.content.url}/readyz")).is_success
        except httpx.TransportError:
            return False

    async def make(self) -> Content:
        drawn = asyncio.create_task(asyncio.to_thread(_drawn))
        try:
            await self._people()
            await self._workflows()
            pictures = await drawn
        finally:
            drawn.cancel()
        await self._workers()
        media = await self._uploaded(self.customer, pictures)
        await self._examples(media, pictures)
        self.say(f"{len(EFFECTS)} effects with examples created by the engine")
        await asyncio.gather(
            self._graphs(media), self._pipeline(pictures["shore"]), self._own_jobs(media), self._studio(pictures)
        )  # fmt: skip
        await self._second_worker_asks()
        await self._waiting_graph(media)
        await self._long_jobs(media)
        await self._count()
        return self.content

    # Operators

    async def _people(self) -> None:
        """Creates tenants. The sign-in link signs in as the local user, who has most of the data."""
        tenants = (await self.admin.call("GET", "/tenants"))["tenants"]
        tenant = next(tenant for tenant in tenants if tenant["name"] == "local")
        users = f"/tenants/{tenant['id']}/users"
        user = (await self.admin.call("GET", users))["users"][0]
        created = await self.admin.post(f"{users}/{user['id']}/keys", name="demo")
        self.content.tenant_id, self.content.customer_key = tenant["id"], created["key"]
        await self._credit(tenant["id"], user["id"], TOKENS)
        self.customer = await self._client(created["key"])
        studio = await self.admin.post("/tenants", name="Halden Studio", email="ada@example.com")
        await self._credit(studio["id"], studio["user_id"], STUDIO_TOKENS)
        self.studio, self.studio_id = await self._client(studio["key"]), studio["id"]
        kiosk = await self.admin.post("/tenants", name="Harbour Kiosk", email="ben@example.com")
        await self._credit(kiosk["id"], kiosk["user_id"], 20)
        await self.admin.post("/operators", name="night-shift", role="operator")
        self.say("Three tenants with users, keys and tokens")

    async def _client(self, key: str) -> Client:
        return await self._stack.enter_async_context(Client(self.content.url, key))

    async def _credit(self, tenant: str, user: str, amount: int) -> None:
        path = f"/tenants/{tenant}/wallets/{user}/credits"
        await self.admin.post(path, amount=amount, provider_transaction_id=f"demo-{user}")

    async def _workflows(self) -> None:
        registered = yaml.safe_load((EXAMPLES / "properties.yaml").read_text("utf-8"))
        for slug, settings in registered.items():
            file = EXAMPLES / settings.pop("file", f"workflows/{slug}.json")
            document = json.loads(file.read_text("utf-8"))
            await self.admin.post("/workflows", slug=slug, document=document, **settings)
        await self.admin.post(
            "/workflows", slug="tint", document=catalogue.TINT_PROMPT, properties=catalogue.TINT_PROPERTIES, price_tokens=1
        )  # fmt: skip
        for effect in EFFECTS:
            await self._publish(effect)
        await self.admin.post("/workflows", slug="oil-portrait", document=catalogue.OIL_PORTRAIT)

    async def _publish(self, effect: Shown) -> None:
        await self.admin.post(
            "/workflows",
            slug=effect.slug,
            document=effect.prompt,
            properties=effect.properties,
            required_capabilities=list(effect.capabilities),
        )
        await self.admin.post(
            "/effects",
            slug=effect.slug,
            workflow_slug=effect.slug,
            title=effect.title,
            description=effect.description,
            price_tokens=effect.price_tokens,
            tags=list(effect.tags),
            media_types=list(effect.media_types),
            overrides={},
            published=True,
        )

    async def _workers(self) -> None:
        """Creates a second fleet. Its worker is the only one that can run the large-format effect."""
        fleet = await self.admin.post("/fleets", slug=STUDIO, stage="production", max_workers=4)
        self.secret = fleet["secret"]
        slugs = [LARGE_FORMAT, "golden-hour", "screen-print", "pixels"]
        path = f"/fleets/{STUDIO}/production/workflows"
        await self.admin.call("PUT", path, {"workflow_slugs": slugs})
        self._start_worker("studio-1")

    def _start_worker(self, name: str) -> None:
        self.processes.start_worker(name, fleet=STUDIO, secret=self.secret, capability=LARGE_FORMAT)

    async def _second_worker_asks(self) -> None:
        """Makes new workers of the second fleet require an operator's approval, and starts one."""
        path = f"/fleets/{STUDIO}/production/approval"
        await self.admin.call("PUT", path, {"approval": "manual"})
        self._start_worker("studio-2")

        async def is_known() -> bool:
            return "studio-2" in await self._worker_ids()

        await until(is_known, "studio-2 to register", STEP_SECONDS_MAX)
        self.content.workers = await self._worker_ids()
        self.say("Two online workers, and a third one that waits for approval")

    async def _worker_ids(self) -> list[str]:
        workers = (await self.admin.call("GET", "/workers"))["workers"]
        return [worker["worker_id"] for worker in workers]

    # Customers

    async def _uploaded(self, client: Client, pictures: Mapping[str, bytes]) -> Media:
        mask = await client.upload(pictures["mask"], filename="mask.png", content_type="image/png")
        names = [name for name in pictures if name not in ("clip", "mask")]
        uploaded = {name: await client.upload(pictures[name], filename=f"{name}.jpg", content_type="image/jpeg") for name in names}  # fmt: skip
        clip = await client.upload(pictures["clip"], filename="ride.mp4", content_type="video/mp4")
        return Media(uploaded, clip, mask)

    async def _applied(
        self, client: Client, effect: Shown, media: Media, scene: str, **chosen: Any
    ) -> JobHandle:
        source = media.clip if effect.is_video else media.pictures[scene]
        painted = {"area": str(media.mask.id)} if effect.takes_mask else {}
        return await client.apply(effect.slug, source, {**painted, **chosen})

    async def _examples(self, media: Media, pictures: Mapping[str, bytes]) -> None:
        room = asyncio.Semaphore(CONCURRENT_JOBS)

        async def run(effect: Shown, scene: str) -> JobHandle:
            async with room:
                job = await self._applied(self.customer, effect, media, scene, **effect.for_example)
                await job.wait(timeout_seconds=STEP_SECONDS_MAX)
            return job

        async def show(effect: Shown) -> None:
            jobs = await asyncio.gather(*(run(effect, scene) for scene in effect.scenes))
            for position, (job, scene) in enumerate(zip(jobs, effect.scenes, strict=True)):
                await self._show_example(effect, position, job, pictures, scene)

        await asyncio.gather(*map(show, EFFECTS))

    async def _show_example(
        self,
        effect: Shown,
        position: int,
        job: JobHandle,
        pictures: Mapping[str, bytes],
        scene: str,
    ) -> None:
        folder = self.processes.folder / "results" / effect.slug
        folder.mkdir(parents=True, exist_ok=True)
        (output,) = await job.download(folder)
        path = f"/effects/{effect.slug}/examples/{position}"
        if effect.is_video:
            await self.admin.send(f"{path}/before", pictures["clip"], "video/mp4")
            await self.admin.send(f"{path}/after", output.read_bytes(), "video/mp4")
            return
        await self.admin.send(f"{path}/before", pictures[scene], "image/jpeg")
        small = await asyncio.to_thread(_small_webp, output.read_bytes())
        await self.admin.send(f"{path}/after", small, "image/webp")

    async def _own_jobs(self, media: Media) -> None:
        """Creates jobs in different states: completed and shared, failed, and cancelled."""
        done = await self._applied(self.customer, catalogue.SOFT_FOCUS, media, "flower", glow=0.8)
        await done.wait(timeout_seconds=STEP_SECONDS_MAX)
        self.content.done_id = str(done.id)
        self.content.media_id = str(media.pictures["flower"].id)
        share = await done.share(expires_in=7 * 24 * 3600, has_original=True)
        self.content.shared_url = share.url
        failed = await self._applied(self.customer, catalogue.PORTRAIT_LIGHT, media, "city")
        self.content.failed_id = str(failed.id)
        with suppress(FleetError):  # this job fails intentionally
            await failed.wait(timeout_seconds=STEP_SECONDS_MAX)
        cancelled = await self._applied(self.customer, catalogue.ENLARGE, media, "shore")
        await cancelled.cancel()
        await self.customer.create_key("website", scopes=["read"])
        await self.customer.create_key("photo booth", scopes=["read", "write"])
        self.say("Completed, failed and cancelled jobs, a shared result, and keys")

    async def _graphs(self, media: Media) -> None:
        files = (EXAMPLES / "graphs" / f"{name}.yaml" for name in ("soften-if-large", "picture-and-clip"))  # fmt: skip
        large, clip = [await self.customer.graphs.create(file.read_text("utf-8")) for file in files]
        await self._triggers(large.id, clip.id)
        inputs = {"photo": str(media.pictures["balloons"].id)}
        failed = await self.customer.graphs.run_document(catalogue.WITH_A_FACE, inputs)
        done = await self.customer.graphs.run_document(catalogue.THREE_PRINTS, inputs)
        self.content.graph_run_id = str(done.run.id)
        self.content.graph_id = str(done.run.graph_id)
        for run in (failed, done):
            with suppress(FleetError):  # the first run fails intentionally
                await run.wait(timeout_seconds=STEP_SECONDS_MAX)
        self.say("Graphs, a run with three results, and a failed run")

    async def _triggers(self, nightly: UUID, order: UUID) -> None:
        schedule = await self.customer.triggers.create(
            "nightly", graph=nightly, cron="30 2 * * MON-FRI", timezone="Europe/Berlin", tokens_per_day=20
        )  # fmt: skip
        await self.customer.triggers.fire(schedule)
        paths = {"photo": "body.order.photo", "clip": "body.order.clip"}
        await self.customer.triggers.create("shop", graph=order, inputs=paths, tokens_per_day=200)
        self.say("Triggers: a schedule that has fired, and a webhook")

    async def _waiting_graph(self, media: Media) -> None:
        """Starts a run that requires an unapproved worker. The run waits for a user's choice."""
        run = await self.customer.graphs.run_document(
            catalogue.LARGE_PRINT, {"photo": str(media.pictures["dunes"].id)}
        )

        async def asks() -> bool:
            return str((await run.refresh()).status) == "waiting_for_user"

        await until(asks, "the graph run to ask a question", STEP_SECONDS_MAX)
        self.content.asking_run_id = str(run.run.id)
        self.say("A graph run that is waiting for your answer")

    async def _pipeline(self, picture: bytes) -> None:
        """Creates base candidates and judges some of them. Approved ones get children."""
        pipeline = await self.customer.pipelines.create(catalogue.PIPELINE)
        photo = upload_source(picture, filename="shore.jpg", content_type="image/jpeg")
        file_id = await upload_to(self.customer.calls, "/api/videos/uploads", photo, None)
        run = await self.customer.pipelines.run(
            pipeline,
            BASE_CANDIDATES,
            {"photo": str(file_id)},
            limits={"concurrent_jobs": 2},
            target_folder="posters",
        )
        self.content.pipeline_id, self.content.pipeline_run_id = str(pipeline.id), str(run.run.id)

        async def is_at_rest() -> bool:
            return str((await run.refresh()).reason) == "waiting_for_judgement"

        await until(is_at_rest, "the candidates to be generated", STEP_SECONDS_MAX)
        candidates = [candidate async for candidate in run.candidates(step=0)]
        for _ in range(3):
            if pair := await run.pair(step=0):
                await run.vote(*pair)
        await run.judge(candidates[0], "approve")
        await run.judge(candidates[1], "approve")
        await run.judge(candidates[2], "reject")
        self.content.candidates = len(candidates)
        self.say(f"A pipeline with {len(candidates)} candidates to judge")

    async def _studio(self, pictures: Mapping[str, bytes]) -> None:
        """Creates jobs of another tenant, so that operators see more than one."""
        media = await self._uploaded(self.studio, pictures)
        for effect in (catalogue.PIXELS, catalogue.SCREEN_PRINT, catalogue.GOLDEN):
            some = list(media.pictures.values())[:BATCH]
            batch = await self.studio.apply_many(effect.slug, [{} for _ in some], media=some)
            await batch.wait(timeout_seconds=STEP_SECONDS_MAX)
        self.studio_media = media
        await self.admin.post("/jobs", workflow_slug="oil-portrait", tenant_id=self.studio_id)
        self.say("Batches of Halden Studio, and a job whose model no worker has")

    async def _long_jobs(self, media: Media) -> None:
        """Starts a long job that sends previews, and jobs that wait for it."""
        running = await self._applied(
            self.customer, catalogue.ENLARGE, media, "ridges", steps=LONG_STEPS
        )
        self.content.running_id = str(running.id)
        for scene in ("forest", "city"):
            await self._applied(self.studio, catalogue.ENLARGE, self.studio_media, scene)

        async def runs() -> bool:
            return str((await running.refresh()).status) == "processing"

        await until(runs, "the studio's worker to start the job", STEP_SECONDS_MAX)

    async def _count(self) -> None:
        counts: dict[str, int] = (await self.admin.call("GET", "/jobs/counts"))["counts"]
        self.content.counts = {status: count for status, count in counts.items() if count}

    async def keep_busy(self) -> None:
        """Submits a job every few seconds, so that the pages show some activity."""
        chosen = (catalogue.PIXELS, catalogue.SCREEN_PRINT)
        for turn in range(BUSY_HOURS_MAX * 3600 // BUSY_SECONDS):
            await asyncio.sleep(BUSY_SECONDS)
            scene = random.choice(list(self.studio_media.pictures))  # noqa: S311 - no security needed
            effect = catalogue.ENLARGE if turn % 20 == 10 else random.choice(chosen)  # noqa: S311
            try:
                await self._applied(self.studio, effect, self.studio_media, scene)
            except FleetError:
                continue  # refused by a limit, so try again in the next turn


async def until(is_so: Callable[[], Any], what: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await is_so():  # noqa: ASYNC110 - another program's state
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise FleetError(f"Timed out after {seconds} s while waiting for {what}.") from None


def _drawn() -> dict[str, bytes]:
    """Returns images of all scenes, a clip and a mask."""
    pictures = {name: draw() for name, draw in scenes.SCENES.items()}
    mask = np.zeros((scenes.HEIGHT, scenes.WIDTH), np.uint8)
    mask[300:560, 120:520] = 255
    target = io.BytesIO()
    Image.fromarray(mask).save(target, "PNG")
    files = {name: scenes.jpeg(picture) for name, picture in pictures.items()}
    return {**files, "clip": scenes.clip(pictures["shore"]), "mask": target.getvalue()}


def _small_webp(content: bytes) -> bytes:
    target = io.BytesIO()
    with Image.open(io.BytesIO(content)) as picture:
        picture.thumbnail((scenes.WIDTH, scenes.HEIGHT))
        picture.convert("RGB").save(target, "WEBP", quality=EXAMPLE_QUALITY)
    return target.getvalue()
