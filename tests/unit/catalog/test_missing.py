"""What a backend lacks of what a version needs."""

from tests.support.jobs.workflows import PROPERTIES, drafted, versioned

from comfyfleet.api.worker import BackendFacts
from comfyfleet.server.catalog.model import missing_on_backend, model_key, model_set
from comfyfleet.server.fleets.model import ModelUse

VERSION = versioned(drafted(*PROPERTIES))
CHECKPOINTS = "CheckpointLoaderSimple.ckpt_name"


def test_a_backend_that_has_everything_lacks_nothing() -> None:
    files: dict[str, tuple[str, ...]] = {
        CHECKPOINTS: ("sdxl.safetensors",),
        "LoraLoader.lora_name": ("fine.safetensors",),
    }
    assert not missing_on_backend(
        VERSION, BackendFacts(node_types=VERSION.node_types, model_files=files)
    )


def test_what_is_missing_is_named() -> None:
    facts = BackendFacts(
        node_types=tuple(name for name in VERSION.node_types if name != "LoraLoader"),
        model_files={CHECKPOINTS: ("other.safetensors",)},
    )
    missing = missing_on_backend(VERSION, facts)
    assert missing.node_types == ("LoraLoader",)
    assert missing.models == (ModelUse(CHECKPOINTS, "sdxl.safetensors"),)
    assert missing.in_words() == "node LoraLoader, model sdxl.safetensors"


def test_a_model_of_an_input_that_is_not_listed_is_given_the_benefit_of_the_doubt() -> None:
    assert not missing_on_backend(VERSION, BackendFacts(node_types=VERSION.node_types))


def test_the_heavy_model_is_found_whatever_stands_before_it() -> None:
    lora = ModelUse("LoraLoader.lora_name", "a.safetensors")
    upscaler = ModelUse("UpscaleModelLoader.model_name", "4x.pth")
    unet = ModelUse("UNETLoader.unet_name", "flux.safetensors")
    wan = ModelUse("WanVideoModelLoader.model", "wan.safetensors")
    assert model_key([lora, upscaler, wan, unet]) == "flux.safetensors"
    assert model_key([lora, upscaler, wan]) == "wan.safetensors"
    assert model_key([lora, upscaler]) == "a.safetensors"
    assert model_key([]) is None
    assert len(model_key([ModelUse("UNETLoader.unet_name", "x" * 400)]) or "") == 64


def test_a_set_of_models_has_no_order() -> None:
    one, two = ModelUse("A.a", "a.pt"), ModelUse("B.b", "b.pt")
    assert model_set([one, two, one]) == model_set([two, one])
    assert model_set([one]) != model_set([two])
