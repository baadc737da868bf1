"""How much a worker that asks for a job has before it."""

from uuid import UUID

from comfyfleet.jobs.polling import load_of
from comfyfleet.wire.messages import HeldLease, Poll

TOKEN = UUID(int=1)


def asking(*held: int, load: int, concurrency: int = 1) -> Poll:
    leases = tuple(HeldLease(dispatch_id=each, lease_token=TOKEN) for each in held)
    return Poll(worker_id="w", current_load=load, max_concurrency=concurrency, held=leases)


def test_what_only_delivers_its_outputs_is_no_load() -> None:
    assert load_of({1, 2}, asking(1, 2, load=1)) == 1
    assert load_of({1, 2}, asking(1, 2, load=0)) == 0


def test_a_lease_on_its_way_to_the_worker_counts() -> None:
    assert load_of({1, 2}, asking(1, load=1)) == 2
    assert load_of({1}, asking(load=0)) == 1


def test_a_worker_that_names_nothing_is_counted_by_what_it_holds() -> None:
    assert load_of({1, 2}, Poll(worker_id="w", current_load=0)) == 2
    assert load_of(set(), Poll(worker_id="w", current_load=3)) == 3


def test_nobody_holds_more_and_more_by_calling_it_delivery() -> None:
    held = {1, 2, 3, 4}
    assert load_of(held, asking(*held, load=0)) == 2
