"""What a prompt costs: fixed, or by seconds that are estimated first and measured then."""

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from tests.support.jobs.context import asked

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.protocol.payloads import RefusedPrompt
from comfyfleet.server.gateway.model import DEFAULT_SECONDS, max_tokens_of, with_price
from comfyfleet.server.jobs.caches import RunSeconds
from comfyfleet.server.jobs.model import MIN_TOKENS, PRICE_PER_SECOND, cost_of, paid_seconds

TENANT, OTHER = UUID(int=1), UUID(int=2)


def test_a_fixed_price_is_reserved_whole() -> None:
    priced = with_price(asked(), FleetPrompts(price_tokens=7), None, None).spec
    assert priced.price_tokens == 7
    assert priced.gateway is None


@pytest.mark.parametrize(("workflow", "tokens"), [(3, 7), (9, 9)])
def test_the_higher_of_the_fleets_price_and_a_contained_workflows_applies(
    workflow: int, tokens: int
) -> None:
    terms = FleetPrompts(price_tokens=7)
    assert with_price(asked(), terms, None, None, least_price=workflow).spec.price_tokens == tokens


def test_a_fixed_price_above_what_the_caller_would_pay_is_refused() -> None:
    with pytest.raises(RefusedPrompt, match="costs 7 tokens, and max_tokens is 6") as refused:
        with_price(asked(), FleetPrompts(price_tokens=7), None, 6)
    assert refused.value.body["error"]["type"] == "price_above_max_tokens"


def test_an_unknown_prompt_reserves_a_default_within_its_fleets_limit() -> None:
    terms = FleetPrompts(price_per_second=0.5)
    priced = with_price(asked(), terms, None, None).spec
    assert priced.price_tokens == DEFAULT_SECONDS / 2
    assert priced.gateway == {PRICE_PER_SECOND: 0.5}
    short = FleetPrompts(price_per_second=0.5, run_limit_seconds=10)
    assert with_price(asked(), short, None, None).spec.price_tokens == 5


def test_three_times_the_longest_run_is_reserved_and_half_of_that_is_enough() -> None:
    terms = FleetPrompts(price_per_second=2)
    priced = with_price(asked(), terms, 100.0, None)
    assert (priced.spec.price_tokens, priced.least_tokens) == (600, 300)
    assert priced.with_balance(299) is None
    smaller = priced.with_balance(300)
    assert smaller is not None
    assert paid_seconds(smaller) == 150
    short = with_price(asked(), terms, 3.0, None)
    assert (short.spec.price_tokens, short.least_tokens) == (2 * DEFAULT_SECONDS, 10)


def test_only_a_users_own_runs_are_remembered() -> None:
    known, mine, yours = RunSeconds(), asked(user_id=UUID(int=3)), asked(user_id=UUID(int=4))
    for seconds in (8.0, 3.0, float("inf")):
        known.note(TENANT, mine, seconds)
    assert known.longest(TENANT, mine) == 8.0
    assert known.longest(TENANT, yours) is None
    assert known.longest(OTHER, mine) is None
    assert known.longest(TENANT, replace(mine, model_set="another")) is None


def test_many_kinds_of_runs_of_one_user_displace_nobody_elses() -> None:
    known, mine, yours = RunSeconds(), asked(user_id=UUID(int=3)), asked(user_id=UUID(int=4))
    known.note(TENANT, mine, 8.0)
    for number in range(20_000):
        known.note(OTHER, replace(yours, model_set=str(number)), 1.0)
    assert known.longest(TENANT, mine) == 8.0


def test_all_that_the_caller_would_pay_is_reserved_up_to_the_fleets_limit() -> None:
    terms = FleetPrompts(price_per_second=2, run_limit_seconds=1_000)
    for longest in (None, 10.0):
        assert with_price(asked(), terms, longest, 700).spec.price_tokens == 700
        assert with_price(asked(), terms, longest, 5_000).spec.price_tokens == 2_000
    assert with_price(asked(), terms, 10.0, 700).least_tokens == 30


@pytest.mark.parametrize(("most", "workflow", "least"), [(0, 0, 2), (1, 0, 2), (6, 7, 7)])
def test_a_metered_prompt_is_refused_if_its_caller_would_not_pay_for_a_second(
    most: int, workflow: int, least: int
) -> None:
    says = f"costs at least {least} tokens, and max_tokens is {most}"
    with pytest.raises(RefusedPrompt, match=says):
        with_price(asked(), FleetPrompts(price_per_second=2), None, most, least_price=workflow)


def test_a_metered_run_ends_where_its_reservation_does() -> None:
    terms = FleetPrompts(price_per_second=2)
    assert paid_seconds(asked()) is None
    assert paid_seconds(with_price(asked(), terms, None, 11).spec) == 5.5
    assert paid_seconds(with_price(asked(), terms, 10.0, None).spec) == DEFAULT_SECONDS


def test_a_metered_prompt_costs_at_least_the_workflow_that_it_contains() -> None:
    terms = FleetPrompts(price_per_second=2)
    priced = with_price(asked(), terms, 1.0, None, least_price=500)
    assert (priced.spec.price_tokens, priced.least_tokens) == (500, 500)
    assert priced.spec.gateway == {PRICE_PER_SECOND: 2, MIN_TOKENS: 500}


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(0.0, 0), (0.01, 1), (2.0, 6), (2.1, 7), (float("inf"), 30_000_000)]
)
def test_seconds_cost_whole_tokens(seconds: float, tokens: int) -> None:
    assert cost_of(seconds, 3.0) == tokens


def test_the_most_that_a_caller_pays_is_told_by_header_query_or_extra_data() -> None:
    assert max_tokens_of({}, {}, {}) is None
    assert max_tokens_of({}, {}, {"max_tokens": 3}) == 3
    assert max_tokens_of({}, {"max_tokens": "2"}, {"max_tokens": 3}) == 2
    assert max_tokens_of({"x-max-tokens": "1"}, {"max_tokens": "2"}, {}) == 1


@pytest.mark.parametrize("given", ["many", "-1", -1, 1.5, True, [], "9" * 30, {}])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(RefusedPrompt, match="max_tokens must be a whole number"):
        max_tokens_of({}, {}, {"max_tokens": given})
