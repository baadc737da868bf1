"""Whether the slot that came with a lease fits what has come out."""

import pytest

from comfyfleet.api.values import OutputSlot
from comfyfleet.worker.job_files import find_slot

SLOT = OutputSlot(name="output.png", url="http://s", headers={"Content-Type": "image/png"})


@pytest.mark.parametrize(
    ("filename", "fits"), [("a.png", True), ("a.webp", False), ("a.mp4", False), ("a", False)]
)
def test_a_slot_fits_what_it_was_made_for(filename: str, fits: bool) -> None:
    assert (find_slot([SLOT], [filename]) == "output.png") == fits


def test_without_files_or_slots_nothing_fits() -> None:
    assert find_slot([SLOT], []) is None
    assert find_slot([], ["a.png"]) is None


def test_a_slot_that_names_no_type_takes_anything() -> None:
    slot = OutputSlot(name="output", url="http://s")
    assert find_slot([slot], ["a.mp4"]) == "output"
