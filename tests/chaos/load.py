"""Customers that use every entry point at once, and remember what the control plane accepted."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid5

import httpx
from tests.chaos.network import jitter
from tests.chaos.receiver import Receiver
from tests.support.jobs.counted_jobs import PROMPT, PROPERTIES
from tests.support.jobs.large_graph import TURN, TURN_PROPERTIES
from tests.support.server.admin_client import Admin

PRICE, TOKENS = 2, 1_000_000
OVER = frozenset({"completed", "failed", "cancelled", "succeeded", "canceled", "expired"})
ANSWER_SECONDS_MAX = 20.0
WAIT_SECONDS = 10
RETRY_SECONDS, PAUSE_SECONDS = 0.5, 1.0
# Between two submissions of a customer: the machine isn't busy, so that probes measure faults and not the load.
IDLE_SECONDS = 6.0
BATCH, CANDIDATES = 3, 2
STEPS = 2
DAY_TOKENS = 1_000_000
GRAPH = {
    "name": "chaos",
    "nodes": [
        {"id": "color", "type": "input", "value_type": "integer"},
        {"id": "make", "type": "workflow", "workflow": "make", "properties": {"steps": STEPS}},
        {"id": "turn", "type": "workflow", "workflow": "turn"},
        {"id": "picture", "type": "output"},
    ],
    "connections": [
        {"from": "color.value", "to": "make.color"},
        {"from": "make.output", "to": "turn.input"},
        {"from": "turn.output.images", "to": "picture.value"},
    ],
}
PIPELINE = {
    "name": "chaos",
    "steps": [
        {"name": "Make", "workflow": "make", "timeout": 600},
        {
            "name": "Turn",
            "workflow": "turn",
            "properties": {"input": "{{ parent.file }}"},
            "timeout": 600,
        },
    ],
}


@dataclass(frozen=True)
class Accepted:
    """Work that the control plane accepted. `id` is its id in the pool's tables."""

    kind: str
    pool: str
    tenant_id: str
    id: str
    detail: str = ""


@dataclass
class Tally:
    """What customers saw: answers by status, the texts of 500s, and lost connections."""

    answers: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    ended: int = 0


class Over(Exception):
    """The load has ended; a submission that was not answered is given up."""


@dataclass
class Customer:
    """One user who submits through one entry point, waits for the end, and repeats what got no answer."""

    name: str
    url: str
    pool: str
    tenant_id: str
    user_id: str
    key: str
    seed: int
    tally: Tally
    things: dict[str, str] = field(default_factory=dict)  # ids of effects, graphs, triggers
    is_over: bool = False

    async def run(self) -> None:
        self.chance = random.Random(self.seed)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=ANSWER_SECONDS_MAX
        ) as self.http:
            number = 0
            while not self.is_over:
                number += 1
                try:
                    await self.act(f"{self.name}-{number}", self.chance.randrange(2**24))
                except Over:
                    return
                await asyncio.sleep(jitter(self.chance, IDLE_SECONDS))

    async def act(self, key: str, color: int) -> None:
        raise NotImplementedError

    def change_key(self, key: str) -> None:
        """Uses another key from the next request on."""
        self.key = key
        self.http.headers["Authorization"] = f"Bearer {key}"

    async def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Repeats the request until it has an answer other than "try again"."""
        while True:
            try:
                answer = await self.http.request(method, path, **arguments)
            except httpx.TransportError as error:
                self.tally.answers[type(error).__name__] += 1
            else:
                self.tally.answers[str(answer.status_code)] += 1
                if answer.status_code == 500:
                    self.tally.errors.append(f"{method} {path}: {answer.text[:300]}")
                # The key may have been revoked after the request was sent with it.
                elif answer.status_code not in (401, 429, 502, 503, 504):
                    return answer
            if self.is_over:
                raise Over
            await asyncio.sleep(jitter(self.chance, RETRY_SECONDS))

    async def submit(self, path: str, body: Any, **arguments: Any) -> dict[str, Any]:
        """Sends the same request once, or twice at the same time: both get the same answer."""
        requests = [
            self.ask("POST", path, json=body, **arguments)
            for _ in range(self.chance.choice((1, 1, 2)))
        ]
        answers = [answer.json() for answer in await asyncio.gather(*requests)]
        if any("id" not in answer for answer in answers):
            self.tally.wrong.append(f"POST {path} was refused: {str(answers)[:300]}")
            raise Over
        if len({answer["id"] for answer in answers}) > 1:
            self.tally.wrong.append(f"one idempotency key, two results at {path}: {answers}")
        return dict(answers[0])

    def accept(self, kind: str, id: str, detail: str = "") -> None:
        self.tally.accepted.append(Accepted(kind, self.pool, self.tenant_id, id, detail))

    async def until_over(self, path: str, field: str = "status", **query: Any) -> None:
        while not self.is_over:
            found = (await self.ask("GET", path, params=query)).json()
            if found.get(field) in OVER or found.get("reason") == "complete":
                self.tally.ended += 1
                return
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))


class EffectCustomer(Customer):
    async def act(self, key: str, color: int) -> None:
        body = {
            "effect_id": self.things["effect"],
            "idempotency_key": key,
            "properties": {"color": color, "steps": STEPS},
        }
        job = await self.submit("/api/ai-jobs", body)
        self.accept("job", job["id"])
        if self.chance.random() < 0.1:
            await self.ask("DELETE", f"/api/ai-jobs/{job['id']}")
        await self.until_over(f"/api/ai-jobs/{job['id']}", wait=WAIT_SECONDS)


class BatchCustomer(Customer):
    async def act(self, key: str, color: int) -> None:
        items = [{"properties": {"color": color + n, "steps": STEPS}} for n in range(BATCH)]
        body = {"effect_id": self.things["effect"], "idempotency_key": key, "items": items}
        batch = await self.submit("/api/ai-jobs/batches", body)
        self.accept("batch", batch["id"])
        while not self.is_over:
            path = f"/api/ai-jobs/batches/{batch['id']}"
            jobs = (await self.ask("GET", path)).json()["jobs"]
            if len(jobs) == BATCH and all(job["status"] in OVER for job in jobs):
                self.tally.ended += 1
                return
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))


class GraphCustomer(Customer):
    async def act(self, key: str, color: int) -> None:
        body = {"inputs": {"color": color}, "idempotency_key": key}
        run = await self.submit(f"/api/graphs/{self.things['graph']}/runs", body)
        self.accept("graph", run["id"])
        await self.until_over(f"/api/graph-runs/{run['id']}")


class PipelineCustomer(Customer):
    async def act(self, key: str, color: int) -> None:
        body = {"base_candidates": CANDIDATES, "idempotency_key": key}
        run = await self.submit(f"/api/pipelines/{self.things['pipeline']}/runs", body)
        self.accept("pipeline", run["id"])
        await self.until_over(f"/api/pipeline-runs/{run['id']}")


def prompt_of(color: int) -> dict[str, Any]:
    """The document of the workflow with other numbers."""
    prompt = deepcopy(PROMPT)
    prompt["1"]["inputs"] |= {"color": color}  # type: ignore[operator]
    prompt["2"]["inputs"] |= {"steps": STEPS}  # type: ignore[operator]
    return prompt


class GatewayCustomer(Customer):
    async def act(self, key: str, color: int) -> None:
        prompt_id = str(UUID(int=self.chance.getrandbits(128), version=4))
        body = {"prompt": prompt_of(color), "prompt_id": prompt_id, "client_id": self.name}
        answer = await self.ask("POST", "/prompt", json=body)
        if answer.status_code != 200:
            self.tally.wrong.append(f"POST /prompt was refused: {answer.text[:300]}")
            raise Over
        job_id = uuid5(UUID(self.user_id), f"{self.tenant_id}/{prompt_id}")
        self.accept("prompt", str(job_id), prompt_id)
        while not self.is_over:
            history = (await self.ask("GET", f"/history/{prompt_id}")).json()
            if prompt_id in history:
                self.tally.ended += 1
                return
            await asyncio.sleep(jitter(self.chance, PAUSE_SECONDS))


class V2Customer(Customer):
    async def act(self, key: str, color: int) -> None:
        headers = {"Idempotency-Key": key}
        body = {"workflow": prompt_of(color)}
        answer = await self.ask("POST", "/api/v2/jobs", json=body, headers=headers)
        found = answer.json()
        if found.get("error", {}) and found["error"].get("code") == "idempotency_key_reuse":
            self.accept("v2 key", key)  # an earlier request arrived, and its answer was lost
            return
        if answer.status_code != 201:
            self.tally.wrong.append(f"POST /api/v2/jobs was refused: {answer.text[:300]}")
            raise Over
        self.accept("v2 key", key)
        await self.until_over(found["urls"]["self"])


class HookCustomer(Customer):
    async def act(self, key: str, color: int) -> None:
        headers = {
            "Authorization": f"Bearer {self.things['hook_secret']}",
            "X-Comfyfleet-Delivery": key,
        }
        path = f"/hooks/{self.things['hook']}"
        firing = await self.submit(path, {"color": color}, headers=headers)
        self.accept("firing", firing["id"], key)
        if run_id := firing.get("run_id"):
            self.accept("graph", run_id)
            await self.until_over(f"/api/graph-runs/{run_id}")


CUSTOMERS: dict[str, type[Customer]] = {
    "effect": EffectCustomer,
    "batch": BatchCustomer,
    "graph": GraphCustomer,
    "pipeline": PipelineCustomer,
    "gateway": GatewayCustomer,
    "v2": V2Customer,
    "hook": HookCustomer,
}


def stock(admin: Admin, fleet: str) -> tuple[str, str]:
    """Registers the workflows and an effect; returns the fleet's secret and the effect's id."""
    secret = admin.create_fleet(fleet)
    documents = {"make": (PROMPT, PROPERTIES, "3"), "turn": (TURN, TURN_PROPERTIES, "4")}
    for slug, (document, properties, output) in documents.items():
        body = {
            "slug": slug,
            "document": document,
            "properties": properties,
            "output_node_id": output,
            "price_tokens": PRICE,
        }
        admin.ask("POST", "/api/admin/workflows", json=body)
    admin.assign(fleet, *documents)
    path = f"/api/admin/fleets/{fleet}/production/prompts"
    admin.ask("PUT", path, json={"price_tokens": PRICE})
    effect = {"slug": "make", "workflow_slug": "make", "price_tokens": PRICE, "published": True}
    return secret, str(admin.ask("POST", "/api/admin/effects", json=effect)["id"])


def new_customers(
    admin: Admin,
    kinds: Mapping[str, type[Customer]],
    url: str,
    pools: Sequence[str],
    effect_id: str,
    tally: Tally,
    chance: random.Random,
) -> list[Customer]:
    """Creates a tenant in each pool, and in each a customer of each kind: a user with tokens and a key."""
    people = []
    for number, _ in enumerate(pools):
        tenant_id = admin.create_tenant(f"tenant {number}")
        pool = str(admin.ask("GET", f"/api/admin/tenants/{tenant_id}")["pool"])
        for kind, make in kinds.items():
            name = f"{kind}-{number}"
            user_id, key = _user(admin, tenant_id, name)
            seed = chance.getrandbits(32)
            customer = make(name, url, pool, tenant_id, user_id, key, seed, tally)
            customer.things["effect"] = effect_id
            people.append(customer)
    return people


def _user(admin: Admin, tenant_id: str, name: str) -> tuple[str, str]:
    path = f"/api/admin/tenants/{tenant_id}"
    user = admin.ask("POST", f"{path}/users", json={"name": name})
    paid = {"amount": TOKENS, "provider_transaction_id": f"paid {user['id']}"}
    admin.ask("POST", f"{path}/wallets/{user['id']}/credits", json=paid)
    key = admin.ask("POST", f"{path}/users/{user['id']}/keys", json={"name": "chaos"})
    return str(user["id"]), str(key["key"])


def prepare(customer: Customer, receiver: Receiver) -> None:
    """Stores what the customer will run, and creates its triggers and its webhook."""
    headers = {"Authorization": f"Bearer {customer.key}"}
    with httpx.Client(base_url=customer.url, headers=headers, timeout=30) as http:

        def post(path: str, body: Any) -> dict[str, Any]:
            answer = http.post(f"/api/{path}", json=body)
            assert answer.is_success, f"{path}: {answer.text}"
            return dict(answer.json())

        webhook = post("webhooks", {"url": receiver.url(customer.name)})
        receiver.secrets[customer.name] = webhook["secret"]
        if isinstance(customer, GraphCustomer):
            customer.things["graph"] = post("graphs", GRAPH)["id"]
        if isinstance(customer, PipelineCustomer):
            customer.things["pipeline"] = post("pipelines", {"document": PIPELINE})["id"]
        if isinstance(customer, HookCustomer):
            graph = post("graphs", GRAPH)["id"]
            limits = {"graph": graph, "tokens_per_day": DAY_TOKENS}
            hook = {"name": "hook", "inputs": {"color": "body.color"}, **limits}
            made = post("triggers", hook)
            customer.things |= {"hook": made["id"], "hook_secret": made["secret"]}
            timed = {"name": "minute", "cron": "* * * * *", "inputs": {"color": 1}, **limits}
            customer.things["schedule"] = post("triggers", timed)["id"]
