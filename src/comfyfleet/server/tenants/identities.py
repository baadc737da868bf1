"""Maps people from an identity provider to a tenant's user and to an operator.

Their ids are derived from the provider's own id, so that a later sign-in finds the same user and
operator."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

from comfyfleet.api.values import is_storable
from comfyfleet.errors import Conflict, Forbidden, InvalidInput
from comfyfleet.server.db import Tx
from comfyfleet.server.tenants import service, store
from comfyfleet.server.tenants.model import (
    ALL_SCOPES,
    NAME_CHARACTERS_MAX,
    Caller,
    NewApiKey,
    NewOperator,
    Operator,
    Role,
    Tenant,
    User,
    check_email,
    new_api_key,
    new_operator_key,
)
from comfyfleet.settings import ClaimRule, Settings, parse_claim_rules

logger = logging.getLogger(__name__)
OF_OPERATORS = UUID("de7a0170-0000-4000-8000-0000000001dc")
SIGN_ON_KEY = "single sign-on"
CREATED_BY = "oidc"
CLAIM_DEPTH_MAX = 5
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@-]+")
OPERATOR_NAME_CHARACTERS_MAX = 80


@dataclass(frozen=True, slots=True)
class Identity:
    """A person, as described by an identity provider."""

    issuer: str
    claims: Mapping[str, Any]

    @property
    def subject(self) -> str:
        return str(self.claims["sub"])

    @property
    def email(self) -> str | None:
        """The email address, if the provider has verified it."""
        email = self.claims.get("email")
        if self.claims.get("email_verified") is not True or not isinstance(email, str):
            return None
        try:
            return check_email(email)
        except InvalidInput:
            return None

    @property
    def name(self) -> str | None:
        name = self.claims.get("name") or self.claims.get("preferred_username")
        if not isinstance(name, str) or not is_storable(name) or not name.isprintable():
            return None
        return name.strip()[:NAME_CHARACTERS_MAX] or None

    def id_within(self, namespace: UUID) -> UUID:
        return uuid5(namespace, f"{self.issuer} {self.subject}")


@dataclass(frozen=True, slots=True)
class IdentityRules:
    """Rules that map people to tenants and to operator roles."""

    tenants: tuple[ClaimRule, ...]
    roles: tuple[ClaimRule, ...]

    def tenant_of(self, identity: Identity) -> UUID | None:
        """Returns the tenant of the first matching rule."""
        return next((UUID(rule.target) for rule in self.tenants if fits(rule, identity)), None)

    def role_of(self, identity: Identity) -> Role | None:
        """Returns the highest role of all matching rules."""
        roles = {Role(rule.target) for rule in self.roles if fits(rule, identity)}
        return next((role for role in reversed(Role) if role in roles), None)


def rules_from(settings: Settings) -> IdentityRules:
    """Parses the rules in the settings. Raises InvalidInput for a rule that can never match."""
    tenants = parse_claim_rules(settings.oidc_tenants, "COMFYFLEET_OIDC_TENANTS")
    roles = parse_claim_rules(settings.oidc_roles, "COMFYFLEET_OIDC_ROLES")
    for name, kind, rules in (
        ("COMFYFLEET_OIDC_TENANTS", UUID, tenants),
        ("COMFYFLEET_OIDC_ROLES", Role, roles),
    ):
        for rule in rules:
            try:
                kind(rule.target)
            except ValueError:
                expected = "the id of a tenant" if kind is UUID else f"one of {', '.join(Role)}"
                raise InvalidInput(
                    f"{name}: {rule.target!r} must be {expected}",
                    field=name,
                    hint=f"Write {name}=claim:value={'TENANT_ID' if kind is UUID else 'operator'}",
                ) from None
    return IdentityRules(tenants, roles)


async def warn_of_unknown_tenants(tx: Tx, rules: IdentityRules) -> None:
    """Logs a warning for each tenant that the rules name but that doesn't exist."""
    if not rules.tenants:
        return
    known = {str(tenant.id) for tenant in await service.list_tenants(tx)}
    for tenant_id in sorted({str(UUID(rule.target)) for rule in rules.tenants} - known):
        logger.warning(
            "COMFYFLEET_OIDC_TENANTS names tenant %s, which doesn't exist, so nobody can sign in to it",
            tenant_id,
        )


def fits(rule: ClaimRule, identity: Identity) -> bool:
    if not rule.claim:
        return True
    if rule.claim == "email":
        return identity.email == rule.value.lower()
    return rule.value in map(_text, _values(identity.claims, rule.claim))


def _values(claims: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Returns the values of a claim. The name may be a path with dots, such as
    `realm_access.roles`."""
    value: Any = claims.get(name)
    if value is None:
        value = claims
        for part in name.split(".", CLAIM_DEPTH_MAX):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, list) else [] if value is None else [value]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


async def ensure_user(tx: Tx, tenant: Tenant, identity: Identity, *, now: datetime) -> User:
    """Returns the tenant's user: the user of an earlier sign-in, otherwise the user with the same
    verified address, otherwise a new user. Raises Forbidden for a deactivated user. `tx` is a
    transaction in the tenant's database."""
    user_id, email = identity.id_within(tenant.id), identity.email
    user = await store.get_user(tx, tenant.id, user_id)
    if user is None and email is not None:
        user = await store.user_by_email(tx, tenant.id, email)
    if user is None:
        user = await service.create_user(
            tx, user_id=user_id, tenant_id=tenant.id, now=now, email=email, name=identity.name
        )
    check_active(user)
    return user


def check_active(user: User) -> None:
    if not user.is_active:
        raise Forbidden("this user was deactivated")


async def ensure_key(tx: Tx, tenant: Tenant, user: User, key_id: UUID, *, now: datetime) -> Caller:
    """Returns the internal key used for single sign-on, which is never shown. Revoking it ends all
    sign-ins of the user."""
    keys = await service.list_keys(tx, tenant.id, user.id)
    # Users may give this name to their own keys, so the other fields are compared as well.
    candidates = (
        api_key
        for api_key in keys
        if api_key.name == SIGN_ON_KEY
        and api_key.scopes == ALL_SCOPES
        and api_key.expires_at is None
    )
    key = next(
        (candidate for candidate in candidates if service.is_key_current(candidate, now)), None
    )
    if key is None:
        new = NewApiKey(key_id, new_api_key(), tenant.id, user.id, SIGN_ON_KEY)
        key = await service.create_key(tx, new, now=now)
    return Caller(key, tenant)


async def find_operator(tx: Tx, identity: Identity) -> Operator | None:
    return await store.operator_by_id(tx, identity.id_within(OF_OPERATORS))


async def ensure_operator(tx: Tx, identity: Identity, role: Role, *, now: datetime) -> Operator:
    """Returns the operator, with the role that the provider currently assigns. Raises Forbidden if
    the operator was revoked."""
    operator = await find_operator(tx, identity)
    if operator is None:
        return await _create_operator(tx, identity, identity.id_within(OF_OPERATORS), role, now)
    if operator.revoked_at is not None:
        raise Forbidden("this operator was revoked")
    if operator.role is not role:
        operator = await store.set_operator_role(tx, operator.id, role) or operator
    return operator


async def _create_operator(
    tx: Tx, identity: Identity, operator_id: UUID, role: Role, now: datetime
) -> Operator:
    for name in _operator_names(identity, operator_id):
        new = NewOperator(operator_id, name, role, new_operator_key(), created_by=CREATED_BY)
        try:
            return await service.create_operator(tx, new, now=now)
        except (Conflict, InvalidInput):
            continue
    raise Conflict("all possible names for this operator are in use")


def _operator_names(identity: Identity, operator_id: UUID) -> Iterator[str]:
    """Yields possible names. A name is never reused for another person, so part of the id is
    appended if the name is in use."""
    identifier = identity.email or identity.claims.get("preferred_username") or identity.subject
    name = _NOT_IN_NAMES.sub("-", str(identifier)).strip("-._@")[:OPERATOR_NAME_CHARACTERS_MAX]
    if name:
        yield name
        yield f"{name}-{operator_id.hex[:8]}"
    yield operator_id.hex
