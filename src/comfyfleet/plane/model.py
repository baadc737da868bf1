"""The control plane as a value: what endpoints and sweeps work with."""

from dataclasses import dataclass, field
from functools import cached_property

from comfyfleet.db import Database, Pools
from comfyfleet.db.turns import Turns
from comfyfleet.dispatch.queue import Queue
from comfyfleet.fetching.outward import Outward
from comfyfleet.graphs.advancing import Graphs
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.settings import Settings
from comfyfleet.plane.meters import Meters, Siblings
from comfyfleet.plane.secrets import AdminKey
from comfyfleet.storage import ObjectStore


@dataclass(frozen=True)
class Plane:
    settings: Settings
    clock: Clock
    central: Database
    pools: Pools
    sides: Sides  # what jobs are done with
    admin_key: AdminKey
    turns: Turns  # among control planes, for sweeps
    outward: Outward  # to customers' addresses
    webhook_key: str  # webhooks' secrets are made from it
    meters: Meters = field(default_factory=Meters)
    siblings: Siblings | None = None  # where several processes serve one port

    @cached_property
    def graphs(self) -> Graphs:
        return Graphs(self.sides)

    @property
    def store(self) -> ObjectStore:
        return self.sides.store

    @property
    def queue(self) -> Queue:
        return self.sides.queue
