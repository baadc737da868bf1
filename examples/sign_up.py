"""The calls for your own sign-up and payment code: create a tenant, create a key, credit a payment.

This code runs on your server with an operator's key, never in a browser. Only the role `owner` may
credit tokens. `comfyfleet admin operators add shop --role owner` prints such a key. Needs `httpx`.
"""

import os
import sys
from typing import Any

import httpx


class Refused(Exception):
    """The control plane refused a call. The message is the API's explanation."""


def control_plane() -> httpx.Client:
    return httpx.Client(
        base_url=os.environ["COMFYFLEET_URL"] + "/api/admin",
        headers={"Authorization": "Bearer " + os.environ["COMFYFLEET_KEY"]},
        timeout=30,
    )


def call(plane: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends a POST request and returns the response."""
    answer = plane.post(path, json=body)
    if answer.is_error:
        raise Refused(f"{path} returned {answer.status_code}: {answer.text}")
    fields: dict[str, Any] = answer.json()
    return fields


def sign_up(plane: httpx.Client, company: str, email: str) -> dict[str, str]:
    """Creates a tenant with its first user and key. Store the ids. The key is shown only once."""
    tenant = call(plane, "/tenants", {"name": company, "email": email})
    return {"tenant_id": tenant["id"], "user_id": tenant["user_id"], "key": tenant["key"]}


def read_only_key(plane: httpx.Client, tenant_id: str, user_id: str) -> str:
    """Creates a read-only key, for example for a page in the customer's browser."""
    body = {"name": "page", "scopes": ["read"]}
    return str(call(plane, f"/tenants/{tenant_id}/users/{user_id}/keys", body)["key"])


def credit(plane: httpx.Client, tenant_id: str, user_id: str, tokens: int, payment_id: str) -> int:
    """Credits tokens and returns the balance. A payment counts once, so repeat this call until it
    succeeds.

    For welcome tokens, choose an id yourself, such as `welcome-USER_ID`.
    """
    body = {"amount": tokens, "provider_transaction_id": payment_id}
    return int(call(plane, f"/tenants/{tenant_id}/wallets/{user_id}/credits", body)["balance"])


def main() -> None:
    with control_plane() as plane:
        customer = sign_up(plane, "Ada's films", "ada@example.com")
        tenant_id, user_id = customer["tenant_id"], customer["user_id"]
        # Print the key first. It is shown only once, but a failed credit can be repeated.
        print(f"tenant {tenant_id}, user {user_id}, key {customer['key']}")
        credit(plane, tenant_id, user_id, 20, f"welcome-{user_id}")
        # In your code, use the payment provider's id. Each id counts once.
        balance = credit(plane, tenant_id, user_id, 500, f"payment-of-{user_id}")
        print(f"the balance is {balance} tokens")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"error: {error}")
