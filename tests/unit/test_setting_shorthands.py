"""A shorthand sets the node that a person would name, says which, and warns when there is none."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.small_server import OBJECT_INFO, node, text_to_image

from comfyfleet.errors import InvalidInput, InvalidValue, LimitExceeded
from comfyfleet.workflow.edit import SHORTHANDS, Edit, set_shorthands, shorthand_places
from comfyfleet.workflow.edit.prompt_flow import STEPS_MAX

Prompt = dict[str, Any]


def short(prompt: Prompt, /, **values: Any) -> Edit:
    return set_shorthands(prompt, OBJECT_INFO, values)


def found(prompt: Prompt, name: str) -> list[str]:
    return [".".join(place) for place in shorthand_places(prompt, OBJECT_INFO, name)]


def with_inputs(prompt: Prompt, key: str, /, **inputs: Any) -> Prompt:
    entry = prompt[key]
    return {**prompt, key: {**entry, "inputs": {**entry["inputs"], **inputs}}}


def guided() -> Prompt:
    """A sampler whose parts are nodes of their own, and whose text takes a detour."""
    prompt = {key: value for key, value in text_to_image().items() if key not in ("3", "7")}
    return {
        **prompt,
        "20": node("Guide", conditioning=["6", 0], guidance=3.5),
        "21": node("PlainGuider", model=["4", 0], conditioning=["20", 0]),
        "22": node("Noise", noise_seed=1),
        "23": node("Method", sampler_name="euler"),
        "24": node("Schedule", steps=20, scheduler="simple", width=512, height=512),
        "25": node("SplitSchedule", sigmas=["24", 0], step=3),
        "3": node(
            "GuidedSampler", noise=["22", 0], guider=["21", 0], sampler=["23", 0], sigmas=["25", 0],
            latent_image=["5", 0],
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("prompt", ["6.text"]),
        ("negative", ["7.text"]),
        ("seed", ["3.seed"]),
        ("steps", ["3.steps"]),
        ("cfg", ["3.cfg"]),
        ("sampler", ["3.sampler_name"]),
        ("scheduler", ["3.scheduler"]),
        ("denoise", ["3.denoise"]),
        ("size", ["5.width", "5.height"]),
        ("width", ["5.width"]),
        ("height", ["5.height"]),
        ("batch", ["5.batch_size"]),
        ("model", ["4.ckpt_name"]),
        ("checkpoint", ["4.ckpt_name"]),
        ("prefix", ["9.filename_prefix"]),
        ("frames", []),
        ("lora", []),
        ("image", []),
    ],
)
def test_the_first_workflow_of_everyone_has_them_all(name: str, places: list[str]) -> None:
    assert found(text_to_image(), name) == places


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("prompt", ["6.text"]),
        ("negative", []),
        ("seed", ["22.noise_seed"]),
        ("steps", ["24.steps"]),
        ("guidance", ["20.guidance"]),
        ("sampler", ["23.sampler_name"]),
        ("scheduler", ["24.scheduler"]),
        ("size", ["5.width", "5.height", "24.width", "24.height"]),
        ("model", ["4.ckpt_name"]),
    ],
)
def test_the_parts_of_a_sampler_are_found_through_its_links(name: str, places: list[str]) -> None:
    assert found(guided(), name) == places


def test_it_says_what_it_set() -> None:
    edit = short(text_to_image(), prompt="a bird", seed="7", size="1024x768")
    assert edit.done == (
        '6 CLIPTextEncode "Wishes v1.5": text "a cat" → "a bird"',
        '3 KSampler "Main sampler": seed 5 → 7',
        "5 EmptyLatentImage: width 512 → 1024",
        "5 EmptyLatentImage: height 512 → 768",
    )
    assert edit.warnings == ()
    assert edit.prompt["5"]["inputs"] == {"width": 1024, "height": 768, "batch_size": 1}


def test_what_is_not_found_is_not_set() -> None:
    edit = short({"1": node("LoadImage", image="cat.png")}, prompt="x", size=[64, 64])
    assert edit.done == ()
    assert [text.partition(":")[0] for text in edit.not_set] == ["prompt", "size"]
    assert "no input found" in edit.not_set[0]


def test_a_negative_that_is_zeroed_out_has_no_text_of_its_own() -> None:
    prompt = {**text_to_image(), "7": node("ZeroOut", conditioning=["6", 0])}
    assert found(prompt, "prompt") == ["6.text"]
    assert found(prompt, "negative") == []


def test_both_sides_are_kept_apart_through_a_node_that_takes_both() -> None:
    prompt = {**text_to_image(), "10": node("Control", positive=["6", 0], negative=["7", 0])}
    prompt = with_inputs(prompt, "3", positive=["10", 0], negative=["10", 1])
    assert found(prompt, "prompt") == ["6.text"]
    assert found(prompt, "negative") == ["7.text"]


def test_an_encoder_with_several_texts_gets_all_of_them() -> None:
    prompt = {**text_to_image(), "6": node("TwoEncoders", text_g="a", text_l="b", name="c")}
    edit = short(prompt, prompt="x")
    assert edit.prompt["6"]["inputs"] == {"text_g": "x", "text_l": "x", "name": "c"}
    assert edit.warnings == (
        "prompt: set in 2 inputs that had different values: 6.text_g, 6.text_l",
    )


def test_an_encoder_for_both_sides_gets_each_its_own() -> None:
    prompt = {**text_to_image(), "6": node("BothSides", prompt="a", negative_prompt="b")}
    prompt = with_inputs(prompt, "3", positive=["6", 0], negative=["6", 1])
    assert found(prompt, "prompt") == ["6.prompt"]
    assert found(prompt, "negative") == ["6.negative_prompt"]


def test_lyrics_are_not_the_prompt() -> None:
    prompt = {**text_to_image(), "6": node("Song", tags="pop", lyrics="la", duration=8.0)}
    assert found(prompt, "prompt") == ["6.tags"]
    assert found(prompt, "lyrics") == ["6.lyrics"]
    assert found(prompt, "duration") == ["6.duration"]


def test_a_guider_with_two_positives_has_one_prompt() -> None:
    prompt = guided()
    prompt["7"] = node("CLIPTextEncode", text="bad", clip=["4", 1])
    prompt["8"] = node("CLIPTextEncode", text="", clip=["4", 1])
    links = {"cond1": ["6", 0], "cond2": ["7", 0], "negative": ["7", 0]}
    prompt["21"] = node("DualGuider", **links, empty_conditioning=["8", 0])
    assert found(prompt, "prompt") == ["6.text"]
    assert found(prompt, "negative") == ["7.text"]
    assert found(prompt, "cfg") == ["21.cfg_conds"]


def test_a_text_behind_a_link_is_set_where_it_is_written() -> None:
    prompt = {**text_to_image(), "10": node("TextValue", "Prompt", value="a cat")}
    edit = short(with_inputs(prompt, "6", text=["10", 0]), prompt="a bird")
    assert edit.done == ('10 TextValue "Prompt": value "a cat" → "a bird"',)


def test_of_a_text_that_is_put_together_the_persons_own_part_is_set() -> None:
    prompt = {
        **text_to_image(),
        "10": node("TextValue", "System prompt", value="You are an artist."),
        "11": node("TextValue", "User prompt", value="a cat"),
        "12": node("Join", a=["11", 0], b=["10", 0], delimiter=" "),
    }
    prompt = with_inputs(prompt, "6", text=["12", 0])
    assert found(prompt, "prompt") == ["11.value"]
    prompt["11"] = node("TextValue", "System prompt", value="Draw!")
    assert found(prompt, "prompt") == ["10.value"]
    prompt["12"] = node("Join", a="nice", b=["10", 0], delimiter=" ")
    assert found(prompt, "prompt") == ["10.value"]
    prompt["12"] = node("Join", a="a cat", b="nice", delimiter=" ")
    assert found(prompt, "prompt") == ["12.a"]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_switch_is_followed_to_the_side_that_it_is_set_to(chosen: bool) -> None:
    prompt = {
        **text_to_image(),
        "10": node("TextValue", value="yes"),
        "11": node("TextValue", value="no"),
        "12": node("Flag", value=chosen),
        "13": node("Choose", switch=["12", 0], on_true=["10", 0], on_false=["11", 0]),
    }
    prompt = with_inputs(prompt, "6", text=["13", 0])
    assert found(prompt, "prompt") == ["10.value" if chosen else "11.value"]


def test_a_text_that_stands_in_a_switch_is_set_there() -> None:
    prompt = {**text_to_image(), "13": node("Choose", switch=False, on_false="a cat")}
    edit = short(with_inputs(prompt, "6", text=["13", 0]), prompt="5")
    assert edit.prompt["13"]["inputs"]["on_false"] == "5"


def test_samplers_that_share_a_text_set_it_once_and_others_all() -> None:
    second = {**text_to_image()["3"]["inputs"], "seed": 6, "latent_image": ["10", 0]}
    prompt = {
        **text_to_image(),
        "10": node("LatentUpscale", samples=["3", 0], width=1024, height=1024),
        "11": node("KSampler", **second),
        "8": node("VAEDecode", samples=["11", 0], vae=["4", 2]),
    }
    assert found(prompt, "prompt") == ["6.text"]
    assert found(prompt, "seed") == ["3.seed", "11.seed"]
    assert found(prompt, "size") == ["5.width", "5.height"], "not that of the enlarged one"


def test_a_sampler_that_goes_on_without_noise_keeps_its_seed() -> None:
    stage = {"positive": ["6", 0], "negative": ["7", 0], "steps": 20, "noise_seed": 1}
    prompt = {
        **text_to_image(),
        "3": node(
            "StagedSampler", **stage, add_noise="enable", latent_image=["5", 0], end_at_step=9
        ),
        "10": node("StagedSampler", **stage, add_noise="disable", latent_image=["3", 0]),
        "8": node("VAEDecode", samples=["10", 0], vae=["4", 2]),
    }
    assert found(prompt, "seed") == ["3.noise_seed"]
    edit = short(prompt, steps=30)
    assert edit.prompt["10"]["inputs"]["steps"] == 30
    assert edit.warnings == ("steps: 3 StagedSampler keeps end_at_step 9",)


def test_a_sampler_without_a_text_only_prepares_something() -> None:
    hints = {"positive": ["30", 0], "negative": ["30", 0]}
    aid = {**text_to_image()["3"]["inputs"], **hints}
    prompt = {
        **text_to_image(),
        "30": node("DepthHint"),
        "31": node("KSampler", **aid),
        "32": node("VAEDecode", samples=["31", 0], vae=["4", 2]),
        "33": node("Control", positive=["6", 0], negative=["7", 0], image=["32", 0]),
    }
    prompt = with_inputs(prompt, "3", positive=["33", 0], negative=["33", 1])
    assert found(prompt, "steps") == ["3.steps"]


def test_what_no_output_needs_is_left_alone() -> None:
    stray = text_to_image()
    prompt = {
        **text_to_image(),
        "60": stray["6"],
        "30": with_inputs(stray, "3", positive=["60", 0])["3"],
    }
    assert found(prompt, "prompt") == ["6.text"]
    assert found(prompt, "seed") == ["3.seed"]


def test_numbers_behind_links_are_set_where_they_are_written() -> None:
    prompt = {
        **text_to_image(),
        "10": node("Number", "Width", value=1024),
        "11": node("Formula", expression="a / 2", a=["10", 0]),
        "12": node("Number", "Seed", value=1),
        "13": node("Formula", expression="a", a=["12", 0]),
    }
    prompt = with_inputs(prompt, "5", width=["11", 0])
    prompt = with_inputs(prompt, "3", seed=["13", 0], steps=["11", 0])
    assert found(prompt, "width") == ["10.value"]
    assert found(prompt, "seed") == ["12.value"]
    assert found(prompt, "steps") == ["3.steps"], "half of something else is not the steps"


def test_a_size_that_is_measured_is_set_where_the_image_gets_it() -> None:
    prompt = {
        **text_to_image(),
        "10": node("LoadImage", image="cat.png"),
        "11": node("ImageScale", image=["10", 0], width=640, height=480),
        "12": node("Measure", image=["11", 0]),
    }
    prompt = with_inputs(prompt, "5", width=["12", 0], height=["12", 1])
    assert found(prompt, "size") == ["11.width", "11.height"]
    prompt["12"] = node("Measure", image=["10", 0])
    edit = short(prompt, size="64x32")
    assert edit.done == (
        "5 EmptyLatentImage: width 64, instead of the link from 12 Measure",
        "5 EmptyLatentImage: height 32, instead of the link from 12 Measure",
    )


def test_the_size_of_an_image_that_is_painted_over_is_that_of_its_scaling() -> None:
    prompt = {
        **text_to_image(),
        "10": node("LoadImage", image="cat.png"),
        "11": node("ImageScale", image=["10", 0], width=640, height=480),
        "5": node("VAEEncode", pixels=["11", 0], vae=["4", 2]),
    }
    assert found(prompt, "size") == ["11.width", "11.height"]
    assert found(prompt, "image") == ["10.image"]


def test_models_that_are_told_the_size_hear_of_the_new_one() -> None:
    prompt = {**text_to_image(), "10": node("Shift", model=["4", 0], width=512, height=512)}
    prompt = with_inputs(prompt, "3", model=["10", 0])
    assert found(prompt, "width") == ["5.width", "10.width"]
    assert found(with_inputs(prompt, "10", width=2048), "width") == ["5.width"]


def test_a_video_has_frames_and_a_frame_rate() -> None:
    prompt = {
        **text_to_image(),
        "5": node("EmptyVideo", width=512, height=512, length=81, batch_size=1),
        "10": node("CreateVideo", images=["8", 0], fps=16.0),
        "9": node("SaveVideo", video=["10", 0], filename_prefix="video"),
    }
    edit = short(prompt, length=33, fps="24")
    assert edit.prompt["5"]["inputs"]["length"] == 33
    assert edit.prompt["10"]["inputs"]["fps"] == 24.0


def test_the_one_lora_is_set_and_of_several_none() -> None:
    prompt = {
        **text_to_image(),
        "10": node("LoraLoader", model=["4", 0], lora_name="a.safetensors"),
    }
    prompt = with_inputs(prompt, "3", model=["10", 0])
    assert (
        short(prompt, lora="b.safetensors").prompt["10"]["inputs"]["lora_name"] == "b.safetensors"
    )
    prompt["11"] = node("LoraLoader", model=["10", 0], lora_name="b.safetensors")
    edit = short(with_inputs(prompt, "3", model=["11", 0]), lora="b.safetensors")
    assert edit.done == ()
    assert edit.not_set == (
        "lora: not set, because several inputs match; set one of "
        '11.lora_name (now "b.safetensors"), 10.lora_name (now "a.safetensors")',
    )


def test_a_file_need_not_be_on_the_server_yet() -> None:
    prompt = {
        "1": node("LoadImage", image="cat.png"),
        "2": node("OwnVideoLoader", video="cat.mp4"),
    }
    edit = short(prompt, image="dog.png", video="dog.mp4")
    assert edit.prompt["1"]["inputs"]["image"] == "dog.png"
    assert edit.prompt["2"]["inputs"]["video"] == "dog.mp4"


def test_a_service_without_a_sampler_works_too() -> None:
    service = node("PictureService", prompt="", negative_prompt="", seed=1, width=512, height=512)
    prompt = {"1": service, "9": node("SaveImage", images=["1", 0], filename_prefix="x")}
    edit = short(
        prompt, prompt="a cat", negative="a dog", seed=2, size="640x480", model="large", duration=10
    )
    assert edit.warnings == ()
    assert edit.prompt["1"]["inputs"] == {
        "prompt": "a cat", "negative_prompt": "a dog", "seed": 2, "width": 640, "height": 480,
        "model": "large", "duration": "10",
    }  # fmt: skip


def test_what_is_to_be_spoken_is_the_prompt_of_a_voice() -> None:
    assert found({"1": node("Speech", text="hello", voice="x")}, "prompt") == ["1.text"]


def test_encoders_that_feed_nothing_are_not_guessed_at() -> None:
    prompt = {key: value for key, value in text_to_image().items() if key in ("4", "6", "7")}
    assert found(prompt, "prompt") == []


def test_a_wrong_value_is_an_error_and_nothing_is_set() -> None:
    with pytest.raises(InvalidValue, match=r"steps: 0 is below.*\n.*sampler_name"):
        short(text_to_image(), seed=1, steps=0, sampler="eulr")
    with pytest.raises(InvalidValue, match="a size; use WIDTHxHEIGHT"):
        short(text_to_image(), size="large")
    edit = set_shorthands(text_to_image(), OBJECT_INFO, {"steps": 0}, check=False)
    assert edit.prompt["3"]["inputs"]["steps"] == 0


def test_an_unknown_shorthand_names_the_closest() -> None:
    with pytest.raises(InvalidInput, match='unknown shorthand "promt"; closest: "prompt"'):
        short(text_to_image(), promt="x")


def test_every_shorthand_has_a_name_of_its_own_and_says_what_it_is() -> None:
    names = [name for one in SHORTHANDS for name in (one.name, *one.aliases)]
    assert len(names) == len(set(names))
    assert all(one.help and not one.help.endswith(".") for one in SHORTHANDS)


def test_circles_end() -> None:
    prompt = {
        "1": node("Guide", conditioning=["2", 0], guidance=1.0),
        "2": node("Guide", conditioning=["1", 0], guidance=1.0),
        "3": node("KSampler", positive=["1", 0], negative=["4", 0], latent_image=["3", 0]),
        "4": node("Choose", on_true=["4", 0], on_false=["5", 0]),
        "5": node("Choose", on_true=["4", 0]),
    }
    for shorthand in SHORTHANDS:
        found(prompt, shorthand.name)


def test_a_search_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STEPS_MAX > 100_000
    monkeypatch.setattr("comfyfleet.workflow.edit.prompt_flow.STEPS_MAX", 10)
    with pytest.raises(LimitExceeded):
        found(text_to_image(), "prompt")


def test_a_long_chain_is_followed_without_recursion() -> None:
    length = 1_500
    chain = {
        f"z{number}": node("ZeroOut", conditioning=[f"z{number + 1}", 0])
        for number in range(length)
    }
    chain[f"z{length}"] = node("CLIPTextEncode", text="far away")
    prompt = with_inputs({**text_to_image(), **chain}, "3", positive=["z0", 0])
    assert found(prompt, "prompt") == [f"z{length}.text"]


CLASSES = st.sampled_from(sorted(OBJECT_INFO))
LINKS = st.tuples(st.sampled_from("1234"), st.integers(0, 2)).map(list)
VALUES = LINKS | st.sampled_from(["text", 5, 0.5, True, None])


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Any classes, linked anyhow: what a careless program might write."""
    prompt = {}
    for key in "1234":
        name = draw(CLASSES)
        declared = OBJECT_INFO[name]["input"]["required"]
        prompt[key] = node(
            name, **{field: draw(VALUES) for field in declared if draw(st.booleans())}
        )
    return prompt


@settings(max_examples=30)
@given(prompts(), st.sampled_from(SHORTHANDS))
def test_whatever_the_prompt_it_is_not_modified(prompt: Prompt, shorthand: Any) -> None:
    before = copy.deepcopy(prompt)
    values = {shorthand.name: "5x5" if shorthand.name == "size" else "5"}
    edit = set_shorthands(prompt, OBJECT_INFO, values, check=False)
    assert prompt == before
    assert edit.done or edit.warnings or edit.not_set
