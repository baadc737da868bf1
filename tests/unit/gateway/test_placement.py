"""Which backends run a prompt, what is answered when none can, and which prompts have one shape."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from comfyfleet.api.admin import FleetPrompts, TenantPrompts
from comfyfleet.protocol.payloads import RefusedPrompt
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.gateway import placement
from comfyfleet.server.gateway.offers import (
    Offer,
    OfferedBackend,
    OfferedNodes,
    RenderedObjectInfo,
    by_kind,
    by_weight,
    merged,
)
from comfyfleet.server.gateway.placement import (
    NOT_ALLOWED,
    TOO_LARGE,
    PromptMatch,
    match_prompt,
    needed_part,
    shape_of,
)
from comfyfleet.server.gateway.policy import policy_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def node_type(inputs: Mapping[str, Any], *outputs: str, is_output: bool = False) -> dict[str, Any]:
    return {"input": {"required": dict(inputs)}, "output": list(outputs), "output_node": is_output}


def backend_with(*models: str, leave_out: str = "") -> dict[str, Any]:
    info = {
        "CheckpointLoaderSimple": node_type({"ckpt_name": [list(models), {}]}, "MODEL"),
        "KSampler": node_type({"model": ["MODEL"], "seed": ["INT", {}]}, "IMAGE"),
        "ImageInvert": node_type({"image": ["IMAGE"]}, "IMAGE"),
        "SaveImage": node_type({"images": ["IMAGE"]}, is_output=True),
        "LoadLatent": node_type({"latent": [[], {}]}, "LATENT"),
    }
    return {name: entry for name, entry in info.items() if name != leave_out}


def fleet(fleet_id: int) -> Fleet:
    return Fleet(fleet_id, f"fleet-{fleet_id}", "production", "", None, fleet_id, None, None, NOW)


def backend(
    fleet_id: int, info: dict[str, Any], *, is_online: bool = True, **terms: Any
) -> OfferedBackend:
    name = f"{fleet_id}/{sorted(info)}/{info}"
    return OfferedBackend(fleet(fleet_id), FleetPrompts(**terms), name, info, is_online, 1, 1)


def offer(*backends: OfferedBackend) -> Offer:
    policies = {each.fleet.id: policy_of(each.terms, TenantPrompts()) for each in backends}
    union = merged(each.object_info for each in backends)
    return Offer([each.fleet for each in backends], backends, policies, union, "")


def prompt(model: str = "a.safetensors", **ids: str) -> dict[str, Any]:
    load, sample, save = (ids.get(each, each) for each in ("load", "sample", "save"))
    return {
        load: {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": model}},
        sample: {"class_type": "KSampler", "inputs": {"model": [load, 0], "seed": 1}},
        save: {"class_type": "SaveImage", "inputs": {"images": [sample, 0]}},
    }


def match(offered: Offer, asked: Mapping[str, Any]) -> PromptMatch:
    return match_prompt(offered, asked, None, {})


def refusal(offered: Offer, asked: Mapping[str, Any]) -> dict[str, Any]:
    with pytest.raises(RefusedPrompt) as caught:
        match(offered, asked)
    return caught.value.body


def test_a_prompt_goes_where_its_model_is() -> None:
    both = offer(
        backend(1, backend_with("a.safetensors")), backend(2, backend_with("b.safetensors"))
    )
    assert [each.id for each in match(both, prompt("b.safetensors")).fleets] == [2]


def test_online_workers_come_before_others_and_others_before_none() -> None:
    away = backend(1, backend_with("a.safetensors"), is_online=False)
    here = backend(2, backend_with("a.safetensors"))
    assert [each.id for each in match(offer(away, here), prompt()).fleets] == [2]
    assert [each.id for each in match(offer(away), prompt()).fleets] == [1]


CUSTOM = node_type(
    {"mode": [["a", "b"], {}], "strength": ["FLOAT", {"max": 1.0}], "image": ["IMAGE"]},
    is_output=True,
)


def custom_prompt(class_type: str = "CustomNode", **inputs: Any) -> dict[str, Any]:
    given = {"mode": "a", "strength": 0.5, "image": ["sample", 0], **inputs}
    return {**prompt(), "custom": {"class_type": class_type, "inputs": given}}


@pytest.mark.parametrize(
    "inputs",
    [{"mode": "c"}, {"strength": 5.0}, {"image": ["load", 0]}, {"mode": "c", "strength": 2}],
)
def test_checks_that_a_custom_node_may_waive_are_left_to_the_backend(
    inputs: dict[str, Any],
) -> None:
    offered = offer(
        backend(1, {**backend_with("a.safetensors"), "CustomNode": CUSTOM}, allows_unknown=True)
    )
    asked = custom_prompt(**inputs)
    del asked["save"]
    assert match(offered, asked).verdict.outputs == ("custom",)


@pytest.mark.parametrize(
    "inputs",
    [
        {"mode": "../a"},
        {"mode": "/etc/passwd"},
        {"mode": "C:a"},
        {"mode": "x\\y"},
        {"mode": "c.safetensors"},
        {"strength": "much"},
        {"image": None},
    ],
)
def test_paths_models_and_values_of_another_type_are_refused_for_custom_nodes_too(
    inputs: dict[str, Any],
) -> None:
    offered = offer(
        backend(1, {**backend_with("a.safetensors"), "CustomNode": CUSTOM}, allows_unknown=True)
    )
    asked = custom_prompt(**inputs)
    if inputs.get("image", 1) is None:
        del asked["custom"]["inputs"]["image"]
    del asked["save"]
    assert refusal(offered, asked)["error"]["type"] == "prompt_outputs_failed_validation"


def test_the_backend_that_lists_a_custom_choice_is_preferred() -> None:
    other = node_type(
        {"mode": [["c"], {}], "strength": ["FLOAT"], "image": ["IMAGE"]}, is_output=True
    )
    offered = offer(
        backend(1, {**backend_with("a.safetensors"), "CustomNode": CUSTOM}, allows_unknown=True),
        backend(2, {**backend_with("a.safetensors"), "CustomNode": other}, allows_unknown=True),
    )
    asked = custom_prompt(mode="c")
    del asked["save"]
    assert [each.id for each in match(offered, asked).fleets] == [2]


def test_core_nodes_are_checked_as_they_declare() -> None:
    body = refusal(offer(backend(1, backend_with())), prompt("c.safetensors"))
    assert body["error"]["type"] == "prompt_outputs_failed_validation"


def test_a_model_that_no_worker_has_is_told_with_the_choices_of_all() -> None:
    both = offer(
        backend(1, backend_with("a.safetensors")), backend(1, backend_with("b.safetensors"))
    )
    body = refusal(both, prompt("c.safetensors"))
    assert body["error"]["type"] == "prompt_outputs_failed_validation"
    [told] = body["node_errors"]["load"]["errors"]
    assert told["type"] == "value_not_in_list"
    assert told["extra_info"]["input_config"][0] == ["a.safetensors", "b.safetensors"]


def test_a_node_type_that_no_worker_has_is_told_as_by_comfyui() -> None:
    asked = {**prompt(), "x": {"class_type": "NoSuchNode", "inputs": {}}}
    body = refusal(offer(backend(1, backend_with("a.safetensors"))), asked)
    assert body["error"]["type"] == "missing_node_type"
    assert body["error"]["extra_info"]["class_type"] == "NoSuchNode"


def test_what_only_two_workers_together_could_run_is_refused() -> None:
    both = offer(
        backend(1, backend_with("a.safetensors", leave_out="ImageInvert")),
        backend(1, backend_with("b.safetensors")),
    )
    inverted = {
        **prompt("a.safetensors"),
        "invert": {"class_type": "ImageInvert", "inputs": {"image": ["sample", 0]}},
        "save2": {"class_type": "SaveImage", "inputs": {"images": ["invert", 0]}},
    }
    body = refusal(both, inverted)
    assert body["node_errors"]["load"]["errors"][0]["type"] == "value_not_in_list"


def test_without_any_backend_the_answer_has_comfyuis_shape() -> None:
    body = refusal(offer(), prompt())
    assert set(body) == {"error", "node_errors"}
    assert set(body["error"]) == {"type", "message", "details", "extra_info"}


def test_a_denied_node_is_refused_with_the_reason_even_if_it_leads_nowhere() -> None:
    asked = {**prompt(), "x": {"class_type": "LoadLatent", "inputs": {"latent": "../../x"}}}
    info = backend_with("a.safetensors")
    told = refusal(offer(backend(1, info)), asked)["error"]
    assert (told["type"], told["extra_info"]["node_id"]) == (NOT_ALLOWED, "x")
    assert "folder of the backend" in told["message"]
    allowing = offer(backend(1, info), backend(2, info, allow=("LoadLatent",)))
    assert [each.id for each in match(allowing, asked).fleets] == [2]


def test_a_prompt_beyond_the_limits_of_all_fleets_is_refused() -> None:
    info = backend_with("a.safetensors")
    assert refusal(offer(backend(1, info, nodes_max=2)), prompt())["error"]["type"] == TOO_LARGE
    long = prompt("x" * 2_000)
    assert refusal(offer(backend(1, info, prompt_bytes_max=1_000)), long)["error"]["type"] == (
        TOO_LARGE
    )
    assert match(offer(backend(1, info, nodes_max=2), backend(2, info)), prompt()).fleets[0].id == 2


@pytest.mark.parametrize("name", [None, 1, 1.5, "", "../SaveImage", "SaveImage ", "\x00"])
def test_strange_class_types_are_missing_nodes(name: Any) -> None:
    asked = {"1": {"class_type": name, "inputs": {}}}
    told = refusal(offer(backend(1, backend_with())), asked)["error"]
    assert told["type"] == "missing_node_type"


def test_a_shape_is_the_same_whatever_ids_and_values_are() -> None:
    assert shape_of(prompt()) == shape_of(prompt("b.safetensors", load="7", sample="1", save="x"))


def test_another_link_or_class_is_another_shape() -> None:
    other_class = prompt()
    other_class["sample"] = {**other_class["sample"], "class_type": "KSamplerAdvanced"}
    twice = {**prompt(), "more": prompt()["save"]}
    other_slot = prompt()
    other_slot["save"] = {"class_type": "SaveImage", "inputs": {"images": ["sample", 1]}}
    shapes = [shape_of(each) for each in (prompt(), other_class, twice, other_slot)]
    assert len(set(shapes)) == 4


def test_a_cycle_or_a_link_to_nothing_has_no_shape() -> None:
    around = {
        "1": {"class_type": "A", "inputs": {"x": ["2", 0]}},
        "2": {"class_type": "A", "inputs": {"x": ["1", 0]}},
    }
    assert shape_of(around) is None
    assert shape_of({"1": {"class_type": "A", "inputs": {"x": ["9", 0]}}}) is None
    assert set(needed_part(around, ["1"])) == {"1", "2"}


def test_the_shape_of_a_node_with_many_sources_is_found_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    links_of = placement._links

    def counted(node: Mapping[str, Any]) -> list[tuple[str, str, float]]:
        seen[node["class_type"]] += 1
        return links_of(node)

    monkeypatch.setattr(placement, "_links", counted)
    sources = {str(number): {"class_type": "A", "inputs": {}} for number in range(500)}
    star = {"class_type": "B", "inputs": {f"x{each}": [each, 0] for each in sources}}
    assert shape_of({"star": star, **sources})
    assert seen["B"] <= 2


def test_choices_of_both_forms_are_merged_the_firsts_first() -> None:
    newer = {"A": {"input": {"required": {"x": ["COMBO", {"options": ["b", "a"]}]}}}}
    more = {"A": {"input": {"required": {"x": ["COMBO", {"options": ["c", "a"]}]}}}, "B": {}}
    union = merged([newer, more])
    assert union["A"]["input"]["required"]["x"] == ["COMBO", {"options": ["b", "a", "c"]}]
    assert set(union) == {"A", "B"}
    assert newer["A"]["input"]["required"]["x"][1] == {"options": ["b", "a"]}


def test_inputs_that_take_uploads_list_the_users_files_and_no_others() -> None:
    image = ["COMBO", {"options": ["of-a-stranger.png"], "image_upload": True}]
    info: dict[str, Any] = {
        "LoadImage": {"input": {"required": {"image": image}}},
        "Z": {"input": {}},
    }
    files = by_kind(["new.png", "old.jpg", "sound.mp3", "sub/inner.png"])
    body = RenderedObjectInfo(info).body(files)
    assert b"stranger" not in body
    assert b'"options":["new.png","old.jpg"]' in body
    assert body.endswith(b'"Z":{"input":{}}}')
    node = OfferedNodes(info, files)["LoadImage"]
    assert node.check_values({"image": "new.png"}) is None
    assert node.check_values({"image": "of-a-stranger.png"}) is not None


def test_a_backend_that_calls_no_input_a_file_does_not_decide_it_for_others() -> None:
    honest = {
        **backend_with(),
        "LoadImage": node_type({"image": [[], {"image_upload": True}]}, "IMAGE"),
    }
    lying = {**honest, "LoadImage": node_type({"image": ["STRING", {}]}, "IMAGE")}
    asked = {
        "load": {"class_type": "LoadImage", "inputs": {"image": "mine.png"}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["load", 0]}},
    }
    offered = offer(backend(1, lying), backend(2, honest))
    found = match_prompt(offered, asked, None, {"image": ["mine.png"]})
    assert len({each.hash for each in found.backends}) == 1


def test_what_most_workers_say_of_a_node_type_is_what_users_see() -> None:
    honest = replace(backend(2, backend_with()), workers=3)
    lying = backend(1, {**backend_with(), "SaveImage": node_type({"path": ["STRING"]})})
    assert by_weight([lying, honest]) == [honest, lying]
