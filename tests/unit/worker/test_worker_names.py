"""Names that a worker makes."""

from uuid import UUID

import pytest

from comfyfleet.worker.settings import default_worker_id, output_names, prompt_id_of

JOB = UUID("7A3C2F60-0000-4000-8000-0000000000AA")


def test_a_prompt_id_is_the_same_for_a_lease_and_another_for_the_next() -> None:
    assert prompt_id_of(JOB, 1) == prompt_id_of(JOB, 1) == prompt_id_of(JOB, 1).lower()
    assert prompt_id_of(JOB, 1) != prompt_id_of(JOB, 2)
    assert str(UUID(prompt_id_of(JOB, 1))) == prompt_id_of(JOB, 1)


@pytest.mark.parametrize(
    ("hostname", "url", "expected"),
    [
        ("gpu7", "http://127.0.0.1:8188", "gpu7-8188"),
        ("gpu7", "http://10.0.0.5:8188", "gpu7-10.0.0.5-8188"),
        ("gpu7", None, "gpu7-cloud"),
        ("läb box", "http://localhost", "l-b-box"),
        ("", None, "cloud"),
        ("é", "http://localhost", "worker"),
    ],
)
def test_a_worker_is_named_after_its_host_and_backend(
    hostname: str, url: str | None, expected: str
) -> None:
    assert default_worker_id(hostname, url) == expected


def test_outputs_have_different_names_and_the_first_takes_the_slot_that_is_there() -> None:
    names = output_names(["a.png", "a.png", "../ö/b.png", "output"], "output")
    assert names[0] == "output"
    assert len(set(names)) == 4
    assert all("/" not in name for name in names)


def test_a_very_long_name_is_cut_at_its_beginning() -> None:
    (name,) = output_names(["x" * 500 + ".png"], None)
    assert len(name) <= 200
    assert name.endswith(".png")
