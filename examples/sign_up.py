"""What your own sign-up and payment code calls: create a tenant, create a key, credit a payment.

It runs on your server with an operator's key (role `operator` or `owner`), never in a browser. Needs `httpx`.
"""

import os

import httpx


def control_plane() -> httpx.Client:
    return httpx.Client(
        base_url=os.environ["COMFYFLEET_URL"] + "/api/admin",
        headers={"Authorization": "Bearer " + os.environ["COMFYFLEET_KEY"]},
        timeout=30,
    )


def sign_up(plane: httpx.Client, company: str, email: str) -> dict[str, str]:
    """Creates a tenant with its first user and key. Store the ids; the key is shown only once."""
    answer = plane.post("/tenants", json={"name": company, "email": email})
    answer.raise_for_status()
    tenant = answer.json()
    return {"tenant_id": tenant["id"], "user_id": tenant["user_id"], "key": tenant["key"]}


def read_only_key(plane: httpx.Client, tenant_id: str, user_id: str) -> str:
    """Creates another key, such as for a page in the customer's browser."""
    body = {"name": "page", "scopes": ["read"]}
    answer = plane.post(f"/tenants/{tenant_id}/users/{user_id}/keys", json=body)
    answer.raise_for_status()
    return str(answer.json()["key"])


def credit(plane: httpx.Client, tenant_id: str, user_id: str, tokens: int, payment_id: str) -> int:
    """Credits tokens and returns the balance. A payment counts once, so repeat this call until it succeeds.

    Welcome tokens are a payment with an id of yours, such as `welcome-USER_ID`.
    """
    body = {"amount": tokens, "provider_transaction_id": payment_id}
    answer = plane.post(f"/tenants/{tenant_id}/wallets/{user_id}/credits", json=body)
    answer.raise_for_status()
    return int(answer.json()["balance"])


if __name__ == "__main__":
    with control_plane() as plane:
        customer = sign_up(plane, "Ada's films", "ada@example.com")
        tenant_id, user_id = customer["tenant_id"], customer["user_id"]
        credit(plane, tenant_id, user_id, 20, f"welcome-{user_id}")
        balance = credit(plane, tenant_id, user_id, 500, "pi_3PqK2x")
        print(f"{tenant_id} has {balance} tokens and the key {customer['key']}")
