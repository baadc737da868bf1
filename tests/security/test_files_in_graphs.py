"""A graph run hands out no file that isn't its user's own, by whatever way its id got in."""

from typing import Any

from tests.support.server.customers import Customer, EffectSetup, png


def passing(**node: Any) -> dict[str, Any]:
    return {
        "name": "passes on",
        "nodes": [{"id": "x", "type": "input", **node}, {"id": "out", "type": "output"}],
        "connections": [{"from": "x.value", "to": "out.value"}],
    }


async def run(customer: Customer, document: dict[str, Any], **inputs: Any) -> Any:
    graph = (await customer.client.post("/api/graphs", json=document)).json()
    return await customer.client.post(f"/api/graphs/{graph['id']}/runs", json={"inputs": inputs})


async def test_the_file_of_a_colleague_is_no_input(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    eve = await effect_setup.customer(ada.tenant_id)
    stolen = {"file_id": await ada.upload()}
    for given in (stolen, [stolen], {"deep": [{"er": stolen}]}, {"file_id": "abc"}):
        refused = await run(eve, passing(), x=given)
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["details"]["problems"][0]["code"] == "unknown_file"


async def test_the_default_of_an_input_hands_out_nothing_either(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    eve = await effect_setup.customer(ada.tenant_id)
    stolen = {"file_id": await ada.upload()}
    done = (await run(eve, passing(default=stolen))).json()
    assert done["status"] == "completed"
    assert done["outputs"]["out"] == stolen


async def test_a_url_that_a_value_brings_is_not_shown_as_that_of_a_file(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    """Graphs are a whole tenant's: what one user writes into one must not lead the others elsewhere."""
    eve = await effect_setup.customer(ada.tenant_id)
    evil = "https://evil.example"
    bait = {"filename": "your result", "mime_type": "text/html", "url": evil, "small_url": evil}
    planted = [{"file_id": str(ada.user_id), **bait}, {"file_id": None, **bait}, {"url": "kept"}]
    document = passing(default=planted)
    graph = (await eve.client.post("/api/graphs", json=document)).json()
    run_of = f"/api/graphs/{graph['id']}/runs"
    done = (await ada.client.post(run_of, json={"inputs": {}})).json()
    assert done["outputs"]["out"][2] == {"url": "kept"}
    assert [each["filename"] for each in done["outputs"]["out"][:2]] == ["your result"] * 2
    seen = await ada.get(f"graph-runs/{done['id']}", urls=True)
    for told in (
        done["outputs"],
        seen["outputs"],
        [each["outputs"] for each in seen["executions"]],
    ):
        assert "evil.example" not in str(told)


async def test_ones_own_file_comes_out_with_a_url(effect_setup: EffectSetup, ada: Customer) -> None:
    own = {"file_id": await ada.upload()}
    done = (await run(ada, passing(), x={"deep": [own]})).json()
    (out,) = done["outputs"]["out"]["deep"]
    assert out["file_id"] == own["file_id"]
    assert (await ada.client.get(out["url"])).status_code == 200


async def operators_file(effect_setup: EffectSetup, ada: Customer) -> str:
    data = png()
    slot = {"filename": "in.png", "content_type": "image/png", "size": len(data)}
    asked = {**slot, "tenant_id": str(ada.tenant_id)}
    made = (await effect_setup.fleet_setup.admin.post("/api/admin/uploads", json=asked)).json()
    upload = made["upload"]
    put = await effect_setup.fleet_setup.admin.put(
        upload["url"], content=data, headers=upload["headers"]
    )
    assert put.status_code in (200, 201), put.text
    file_id: str = made["file_id"]
    return file_id


async def test_what_an_operator_uploaded_for_the_tenant_is_no_users(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    operators = {"file_id": await operators_file(effect_setup, ada)}
    refused = await run(ada, passing(), x=operators)
    assert refused.status_code == 422, refused.text
    done = (await run(ada, passing(default=operators))).json()
    assert done["outputs"]["out"] == operators
    drawn = {
        "name": "draws",
        "nodes": [
            {
                "id": "n",
                "type": "workflow",
                "effect": effect_setup.invert.slug,
                "properties": {"input": operators["file_id"]},
            },
            {"id": "out", "type": "output"},
        ],
        "connections": [{"from": "n.output", "to": "out.value"}],
    }
    started = (await run(ada, drawn)).json()
    assert started["status"] == "failed", started
    assert "was not found" in str(started["error"])
