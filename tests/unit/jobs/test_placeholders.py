"""Assets can be put into a prompt by their binding or by their placeholder, with the same result."""

import json
import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from comfyfleet.api.values import Asset
from comfyfleet.api.worker import Job, with_placeholders
from comfyfleet.worker.job_files import fill_prompt

INPUT, MASK = "{{INPUT_VIDEO}}", "{{MASK}}"


def job(inputs: dict[str, Any], *assets: Asset, **others: Any) -> Job:
    return Job(
        dispatch_id=1,
        job_id=uuid4(),
        lease_token=UUID(int=7),
        lease_number=1,
        attempt=1,
        lease_expires_at=datetime(2026, 11, 15, tzinfo=UTC),
        lease_seconds=900,
        provider="self_hosted",
        workflow_slug="x",
        prompt={"1.2": {"class_type": "LoadImage", "inputs": inputs}, **others},
        assets=assets,
    )


def asset(name: str, binding: str | None, placeholder: str | None = None) -> Asset:
    return Asset(
        name=name, filename="a.png", url="u", size=1, binding=binding, placeholder=placeholder
    )


def both_ways(made: Job) -> tuple[Any, Any]:
    """The prompt of a worker that uses bindings, and that of one that replaces placeholders."""
    names = {each.name: f"{each.name}.png" for each in made.assets}
    text = json.dumps(made.prompt)
    for each in made.assets:
        assert each.placeholder
        text = text.replace(each.placeholder, names[each.name])
    bound = tuple(
        each.model_copy(update={"placeholder": None}) if each.binding else each
        for each in made.assets
    )
    return fill_prompt(made.prompt, names, bound), json.loads(text)


def test_the_placeholder_of_the_workflow_is_kept() -> None:
    made = with_placeholders(job({"image": INPUT, "text": "a cat"}, asset("input", "1.2.image")))
    assert made.assets[0].placeholder == INPUT
    bound, replaced = both_ways(made)
    assert bound == replaced
    assert bound["1.2"]["inputs"] == {"image": "input.png", "text": "a cat"}


def test_many_assets_beside_a_long_text_take_little_time() -> None:
    inputs = {f"i{number}": "x" for number in range(500)}
    assets = [asset(f"a{number}", f"1.2.i{number}") for number in range(500)]
    given = job(
        inputs, *assets, **{"3": {"class_type": "T", "inputs": {"text": "{{x}} " * 600_000}}}
    )
    before = time.process_time()
    made = with_placeholders(given)
    assert time.process_time() - before < 1.0  # 500 searches of the text take 3 s
    assert [each.placeholder for each in made.assets[:2]] == ["{{a0}}", "{{a1}}"]


def test_a_placeholder_in_a_users_text_is_not_replaced() -> None:
    given = job(
        {"image": INPUT, "text": f"write {INPUT} and {{{{input}}}}"}, asset("input", "1.2.image")
    )
    bound, replaced = both_ways(with_placeholders(given))
    assert bound == replaced
    assert bound["1.2"]["inputs"]["text"] == f"write {INPUT} and {{{{input}}}}"


def test_a_bound_input_without_a_placeholder_gets_one() -> None:
    given = job(
        {"image": "example.png", "mask": "example.png"},
        asset("input", "1.2.image"),
        asset("mask", "1.2.mask"),
        other={"class_type": "Note", "inputs": {"text": "example.png"}},
    )
    bound, replaced = both_ways(with_placeholders(given))
    assert bound == replaced
    assert bound["1.2"]["inputs"] == {"image": "input.png", "mask": "mask.png"}
    assert bound["other"]["inputs"]["text"] == "example.png"


def test_a_placeholder_inside_a_text_stays() -> None:
    given = job(
        {"text": f"by {MASK}", "image": MASK},
        asset("mask", "1.2.image"),
        asset("mask#2", None, MASK),
    )
    made = with_placeholders(given)
    first, second = made.assets
    assert second.placeholder == MASK
    assert first.placeholder not in (None, MASK)
    bound, replaced = both_ways(made)
    assert bound == replaced
