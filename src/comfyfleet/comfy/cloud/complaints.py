"""What the cloud says when it does not do what was asked. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Complaint:
    """Both empty where something else than the cloud has answered."""

    code: str = ""
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    has_envelope: bool = False

    @property
    def is_about_money(self) -> bool:
        """v1 says 429 both for too many requests and for a subscription that has ended."""
        text = self.message.lower()
        return "not paid" in text or "subscription" in text or self.code == "insufficient_credits"


def complaint_in(body: bytes) -> Complaint:
    """v1 tells code and message bare, v2 in an envelope `{"error": {…}}`."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return Complaint()
    if not isinstance(told, dict):
        return Complaint()
    inner = told.get("error")
    if not isinstance(inner, dict):
        return Complaint(str(told.get("code") or ""), str(told.get("message") or inner or ""))
    details = inner.get("details")
    return Complaint(
        str(inner.get("code") or ""),
        str(inner.get("message") or ""),
        details if isinstance(details, dict) else {},
        has_envelope="code" in inner,
    )
