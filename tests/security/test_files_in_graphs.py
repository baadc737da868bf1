"""A graph run hands out no file that isn't its user's own, by whatever way its id got in."""

from typing import Any

from tests.planekit.customers import Customer, Shop


def passing(**node: Any) -> dict[str, Any]:
    return {
        "name": "passes on",
        "nodes": [{"id": "x", "type": "input", **node}, {"id": "out", "type": "output"}],
        "connections": [{"from": "x.value", "to": "out.value"}],
    }


async def run(customer: Customer, document: dict[str, Any], **inputs: Any) -> Any:
    graph = (await customer.client.post("/api/graphs", json=document)).json()
    return await customer.client.post(f"/api/graphs/{graph['id']}/runs", json={"inputs": inputs})


async def test_the_file_of_a_colleague_is_no_input(shop: Shop, ada: Customer) -> None:
    eve = await shop.customer(ada.tenant_id)
    stolen = {"file_id": await ada.upload()}
    for given in (stolen, [stolen], {"deep": [{"er": stolen}]}, {"file_id": "abc"}):
        refused = await run(eve, passing(), x=given)
        assert refused.status_code == 422, refused.text
        assert refused.json()["error"]["details"]["problems"][0]["code"] == "unknown_file"


async def test_the_default_of_an_input_hands_out_nothing_either(shop: Shop, ada: Customer) -> None:
    eve = await shop.customer(ada.tenant_id)
    stolen = {"file_id": await ada.upload()}
    done = (await run(eve, passing(default=stolen))).json()
    assert done["status"] == "completed"
    assert done["outputs"]["out"] == stolen


async def test_ones_own_file_comes_out_with_a_url(shop: Shop, ada: Customer) -> None:
    own = {"file_id": await ada.upload()}
    done = (await run(ada, passing(), x={"deep": [own]})).json()
    (out,) = done["outputs"]["out"]["deep"]
    assert out["file_id"] == own["file_id"]
    assert (await ada.client.get(out["url"])).status_code == 200
