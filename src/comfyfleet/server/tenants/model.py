"""The model of tenants, users, API keys, operators, wallets and transactions: data and pure
rules."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.account import Scope as Scope
from comfyfleet.api.account import TransactionType as TransactionType
from comfyfleet.api.admin import Fault as Fault
from comfyfleet.api.admin import Role as Role
from comfyfleet.api.admin import TenantPrompts
from comfyfleet.api.values import is_storable
from comfyfleet.errors import Forbidden, InvalidInput
from comfyfleet.server.secrets import new_key

NAME_CHARACTERS_MAX = 200
PRIORITY_MIN, PRIORITY_MAX = -10, 10
PRIORITY_LIMIT = 1_000_000
RETENTION_DAYS_MAX = 36_500
ERASED = "erased"
# The default tenant for operators' jobs. It is created at the first start.
DEFAULT_TENANT = UUID("de7a0170-0000-4000-8000-000000000000")


@dataclass(frozen=True, slots=True)
class Tenant:
    id: UUID
    name: str
    pool: str
    min_priority: int
    max_priority: int
    max_queued: int | None  # None means the default from the settings
    created_at: datetime
    retention_days: int | None = None  # None means the default from the settings
    max_storage_bytes: int | None = None  # None means the default from the settings
    erasing_at: datetime | None = None
    erased_at: datetime | None = None
    gateway: Mapping[str, Any] | None = (
        None  # the fleets and node types that the tenant's prompts may use
    )
    show_backends: bool | None = None  # None means the default from the settings

    @property
    def subject(self) -> str:
        return f"tenant:{self.id}"

    @property
    def prompts(self) -> TenantPrompts:
        """The fleets and node types that the tenant's prompts from ComfyUI clients may use."""
        return TenantPrompts.model_validate(self.gateway or {})

    def sees_backends(self, usual: bool) -> bool:
        """Checks whether the tenant's users see machine names, tracebacks and devices. `usual` is
        the default."""
        return usual if self.show_backends is None else self.show_backends

    def clamped(self, priority: int) -> int:
        """Returns the nearest priority that this tenant may use."""
        return max(self.min_priority, min(self.max_priority, priority))


def check_tenant_name(name: str) -> str:
    text = name.strip()
    if not text or len(text) > NAME_CHARACTERS_MAX or not is_storable(text):
        raise InvalidInput(
            f"a tenant's name must have 1 to {NAME_CHARACTERS_MAX} characters", field="name"
        )
    return text


def check_limits(*, min_priority: int, max_priority: int, max_queued: int | None) -> None:
    if not -PRIORITY_LIMIT <= min_priority <= max_priority <= PRIORITY_LIMIT:
        raise InvalidInput(
            f"the priorities must be a range within ±{PRIORITY_LIMIT:,}, not {min_priority} to {max_priority}",
            field="min_priority",
        )
    if max_queued is not None and max_queued < 0:
        raise InvalidInput(f"max_queued must be 0 or more, not {max_queued}", field="max_queued")


def check_retention(days: int | None) -> int | None:
    if days is not None and not 1 <= days <= RETENTION_DAYS_MAX:
        raise InvalidInput(
            f"retention_days must be between 1 and {RETENTION_DAYS_MAX:,}, not {days}",
            field="retention_days",
        )
    return days


EMAIL_CHARACTERS_MAX = 320


@dataclass(frozen=True, slots=True)
class User:
    id: UUID
    tenant_id: UUID
    email: str | None
    name: str | None
    is_active: bool
    created_at: datetime

    @property
    def subject(self) -> str:
        return f"user:{self.id}"


def check_email(email: str | None) -> str | None:
    """Returns the address in lower case, so that it is unique regardless of case. Doesn't verify
    who owns it."""
    if email is None:
        return None
    text = email.strip().lower()
    name, at, domain = text.rpartition("@")
    is_short = len(text) <= EMAIL_CHARACTERS_MAX
    if not (name and at and domain and is_short and text.isprintable()) or " " in text:
        raise InvalidInput("this isn't a valid email address", field="email")
    return text


def check_user_name(name: str | None) -> str | None:
    if name is None:
        return None
    text = name.strip()
    if not text or len(text) > NAME_CHARACTERS_MAX or not text.isprintable():
        raise InvalidInput(
            f"a user's name must have 1 to {NAME_CHARACTERS_MAX} characters", field="name"
        )
    return text


# Allows secret scanners to recognize these keys.
API_KEY_PREFIX = "cf_"
API_KEY_SHOWN_CHARACTERS = len(API_KEY_PREFIX) + 8
KEYS_PER_USER_MAX = 100
# A key's last use is recorded at most once a minute, so that most requests cause no write.
KEY_USE_NOTED_EVERY = timedelta(minutes=1)


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key to create. `key` comes from `new_api_key`. Only its hash is stored, so this is the only
    time it can be shown."""

    id: UUID
    key: str
    tenant_id: UUID
    user_id: UUID
    name: str
    scopes: Collection[str] = ALL_SCOPES
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    name: str
    prefix: str  # the first characters, to identify the key
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    def is_use_recorded(self, now: datetime) -> bool:
        return self.last_used_at is not None and now - self.last_used_at < KEY_USE_NOTED_EVERY


@dataclass(frozen=True, slots=True)
class Caller:
    """The key and tenant of a request. `session_id` identifies a browser that signed in with the
    key."""

    key: ApiKey
    tenant: Tenant
    session_id: UUID | None = None

    @property
    def user_id(self) -> UUID:
        return self.key.user_id

    def require(self, scope: Scope) -> None:
        if scope not in self.key.scopes:
            raise Forbidden(f"this key doesn't have the scope {scope}", scope=scope)


def new_api_key() -> str:
    """Generates a random 256-bit key with the prefix. Not pure, so only the outer layers may call
    it."""
    return API_KEY_PREFIX + new_key()


def check_key_name(name: str) -> str:
    text = name.strip()
    if not text or len(text) > NAME_CHARACTERS_MAX or not text.isprintable():
        raise InvalidInput(
            f"a key's name must have 1 to {NAME_CHARACTERS_MAX} characters", field="name"
        )
    return text


def check_scopes(scopes: Collection[str]) -> frozenset[Scope]:
    known = {str(scope) for scope in Scope}
    unknown = sorted(set(scopes) - known)
    if unknown:
        raise InvalidInput(f"unknown scope {unknown[0]!r}; use {', '.join(Scope)}", field="scopes")
    checked = frozenset(Scope(scope) for scope in scopes)
    if not checked:
        raise InvalidInput("a key must have at least one scope", field="scopes")
    return checked


# Allows secret scanners to recognize these keys.
OPERATOR_KEY_PREFIX = "cfo_"
OPERATOR_KEY_SHOWN_CHARACTERS = len(OPERATOR_KEY_PREFIX) + 8
# A key's last use is recorded at most once a minute, so that most requests cause no write.
OPERATOR_USE_NOTED_EVERY = timedelta(minutes=1)
# The name of the operator with the admin key, which comes from the environment or is generated at
# the first start.
FIRST_OWNER = "admin"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")


@dataclass(frozen=True, slots=True)
class NewOperator:
    """An operator to create. `key` comes from `new_operator_key`. Only its hash is stored, so this
    is the only time it can be shown."""

    id: UUID
    name: str
    role: Role
    key: str
    created_by: str


@dataclass(frozen=True, slots=True)
class Operator:
    id: UUID
    name: str
    role: Role
    prefix: str  # the first characters of the key, to identify it
    created_at: datetime
    created_by: str
    revoked_at: datetime | None
    last_used_at: datetime | None

    @property
    def subject(self) -> str:
        return f"operator:{self.name}"

    def is_use_recorded(self, now: datetime) -> bool:
        return self.last_used_at is not None and now - self.last_used_at < OPERATOR_USE_NOTED_EVERY


@dataclass(frozen=True, slots=True)
class ActingOperator:
    """The operator of a request. `actor` is the name in the audit log."""

    actor: str
    role: Role

    def require(self, role: Role) -> None:
        if not self.role.includes(role):
            raise Forbidden(
                f"this requires the role {role}, but this key has the role {self.role}", role=role
            )


# Limit for sign-ins with one key. Another sign-in ends the oldest one.
SESSIONS_PER_KEY_MAX = 20


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """The sign-in of a browser: a customer, an operator, or one person as both."""

    id: UUID
    customer: Caller | None = None
    customer_until: datetime | None = None
    operator: ActingOperator | None = None
    operator_until: datetime | None = None
    operator_row: Operator | None = None  # None for the first owner, who has only a key

    @property
    def is_of_first_owner(self) -> bool:
        return self.operator is not None and self.operator_row is None

    @property
    def is_empty(self) -> bool:
        return self.customer is None and self.operator is None

    @property
    def until(self) -> datetime | None:
        """The time when the first of the two sign-ins expires."""
        return min(filter(None, (self.customer_until, self.operator_until)), default=None)


def new_operator_key() -> str:
    """Generates a random 256-bit key with the prefix. Not pure, so only the outer layers may call
    it."""
    return OPERATOR_KEY_PREFIX + new_key()


def check_operator_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == FIRST_OWNER:
        raise InvalidInput(
            "an operator's name must have 1 to 100 letters, digits and . _ @ -, begin with a letter or "
            f"digit, and differ from {FIRST_OWNER}",
            field="name",
        )
    return name


# Low enough that JavaScript numbers can represent the sum of a thousand such amounts exactly.
AMOUNT_TOKENS_MAX = 1_000_000_000_000
PROVIDER_ID_CHARACTERS_MAX = 200


SETTLES = frozenset({TransactionType.JOB_CONSUME, TransactionType.JOB_REFUND})


@dataclass(frozen=True, slots=True)
class TokenWallet:
    tenant_id: UUID
    user_id: UUID
    balance: int
    created_at: datetime


class WalletSummary(NamedTuple):
    """The changes of a wallet within a period, in tokens."""

    added: int
    spent: int  # tokens for completed jobs
    refunded: int


@dataclass(frozen=True, slots=True)
class LedgerTransaction:
    """An entry of the ledger. It never changes."""

    id: int
    tenant_id: UUID
    user_id: UUID
    job_id: UUID | None
    type: TransactionType
    amount: int  # the change of the balance
    provider_transaction_id: str | None
    created_at: datetime


class PaymentClaim(NamedTuple):
    """A payment, identified by the provider's payment id, and the wallet that it is credited to."""

    provider_transaction_id: str
    tenant_id: UUID
    user_id: UUID
    amount: int


class Credited(NamedTuple):
    balance: int
    is_new: bool  # False means this payment was credited before


class Reserved(NamedTuple):
    amount: int  # total for all jobs
    balance: int  # the remaining balance
    is_new: bool


class Settlement(NamedTuple):
    """The settlement of a job. `is_new` is False if the job had already been settled."""

    type: TransactionType
    user_id: UUID
    reserved_tokens: int
    is_new: bool


class JobLedgerFacts(NamedTuple):
    """The facts about a job that the ledger check uses."""

    job_id: UUID
    reserved_tokens: int
    is_ended: bool
    is_completed: bool
    is_metered: bool = False  # priced per second, so the job may be charged even if it failed


@dataclass(frozen=True, slots=True)
class LedgerDrift:
    """An inconsistency found by the ledger check."""

    fault: Fault
    tenant_id: UUID
    user_id: UUID | None
    job_id: UUID | None
    message: str


def check_amount(amount: int, *, least: int) -> int:
    # In Python a bool is an int, but it isn't a valid amount.
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise InvalidInput("an amount of tokens must be a whole number", field="amount")
    if not least <= amount <= AMOUNT_TOKENS_MAX:
        raise InvalidInput(
            f"an amount of tokens must be between {least} and {AMOUNT_TOKENS_MAX:,}, not {amount}",
            field="amount",
        )
    return amount


def check_provider_id(provider_transaction_id: str) -> str:
    if not provider_transaction_id.strip() or (
        len(provider_transaction_id) > PROVIDER_ID_CHARACTERS_MAX
        or not is_storable(provider_transaction_id)
    ):
        raise InvalidInput(
            "the payment provider's transaction id must have 1 to "
            f"{PROVIDER_ID_CHARACTERS_MAX} characters",
            field="provider_transaction_id",
        )
    return provider_transaction_id


def drifts_of_job(
    tenant_id: UUID, job: JobLedgerFacts, transactions: Sequence[LedgerTransaction]
) -> list[LedgerDrift]:
    """Returns the inconsistencies of a job. `transactions` are all its transactions."""
    reserve = next(
        (
            transaction
            for transaction in transactions
            if transaction.type is TransactionType.JOB_RESERVE
        ),
        None,
    )
    settled = [transaction for transaction in transactions if transaction.type in SETTLES]
    user_id = transactions[0].user_id if transactions else None
    faults = [*_amount_faults(job, reserve, settled), *_settlement_faults(job, reserve, settled)]
    return [LedgerDrift(fault, tenant_id, user_id, job.job_id, says) for fault, says in faults]


def _amount_faults(
    job: JobLedgerFacts, reserve: LedgerTransaction | None, settled: Sequence[LedgerTransaction]
) -> list[tuple[Fault, str]]:
    if reserve is None:
        if job.reserved_tokens or settled:
            says = f"{job.reserved_tokens} tokens should be reserved, but none are"
            return [(Fault.NOT_RESERVED, says)]
        return []
    if -reserve.amount != job.reserved_tokens:
        says = f"{-reserve.amount} tokens are reserved, but the job requires {job.reserved_tokens}"
        return [(Fault.AMOUNT, says)]
    return []


def _settlement_faults(
    job: JobLedgerFacts, reserve: LedgerTransaction | None, settled: Sequence[LedgerTransaction]
) -> list[tuple[Fault, str]]:
    if reserve is None:
        return []
    if not settled:
        says = "the job has ended, but its tokens are still reserved"
        return [(Fault.NOT_SETTLED, says)] if job.is_ended else []
    if not job.is_ended:
        return [(Fault.SETTLED_EARLY, f"the job is still active after its {settled[0].type}")]
    expected = TransactionType.JOB_CONSUME if job.is_completed else TransactionType.JOB_REFUND
    if settled[0].type is not expected and not (job.is_metered and not job.is_completed):
        return [(Fault.SETTLED_WRONGLY, f"{settled[0].type} instead of {expected}")]
    return []
