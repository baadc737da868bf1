"""What a prompt costs: fixed, or by seconds that are estimated first and measured then."""

from typing import Any

import pytest
from tests.support.jobs.context import asked

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.protocol.payloads import RefusedPrompt
from comfyfleet.server.gateway.model import DEFAULT_SECONDS, max_tokens_of, with_price
from comfyfleet.server.jobs.caches import RunSeconds
from comfyfleet.server.jobs.model import PRICE_PER_SECOND, cost_of, paid_seconds


def test_a_fixed_price_is_reserved_whole() -> None:
    priced = with_price(asked(), FleetPrompts(price_tokens=7), RunSeconds(), None)
    assert priced.price_tokens == 7
    assert priced.gateway is None


def test_a_fixed_price_above_what_the_caller_would_pay_is_refused() -> None:
    with pytest.raises(RefusedPrompt, match="costs 7 tokens, and max_tokens is 6") as refused:
        with_price(asked(), FleetPrompts(price_tokens=7), RunSeconds(), 6)
    assert refused.value.body["error"]["type"] == "price_above_max_tokens"


def test_an_unknown_prompt_reserves_a_default_within_its_fleets_limit() -> None:
    terms = FleetPrompts(price_per_second=0.5)
    priced = with_price(asked(), terms, RunSeconds(), None)
    assert priced.price_tokens == DEFAULT_SECONDS / 2
    assert priced.gateway == {PRICE_PER_SECOND: 0.5}
    short = FleetPrompts(price_per_second=0.5, run_limit_seconds=10)
    assert with_price(asked(), short, RunSeconds(), None).price_tokens == 5


def test_like_prompts_teach_how_much_is_reserved() -> None:
    known, terms = RunSeconds(), FleetPrompts(price_per_second=2)
    for seconds in (8.0, 3.0):
        known.note(asked(), seconds)
    assert with_price(asked(), terms, known, None).price_tokens == 24
    other = asked(model_set="another")
    assert with_price(other, terms, known, None).price_tokens == 2 * DEFAULT_SECONDS


def test_no_more_is_reserved_than_the_caller_would_pay() -> None:
    priced = with_price(asked(), FleetPrompts(price_per_second=2), RunSeconds(), 11)
    assert priced.price_tokens == 11


def test_of_a_prompt_like_no_other_all_that_the_caller_would_pay_is_reserved() -> None:
    known, terms = RunSeconds(), FleetPrompts(price_per_second=2, run_limit_seconds=1_000)
    assert with_price(asked(), terms, known, 700).price_tokens == 700
    assert with_price(asked(), terms, known, 5_000).price_tokens == 2_000
    known.note(asked(), 10.0)
    assert with_price(asked(), terms, known, 700).price_tokens == 30


def test_nobody_who_would_pay_nothing_gets_a_metered_run() -> None:
    with pytest.raises(RefusedPrompt, match="max_tokens is 0"):
        with_price(asked(), FleetPrompts(price_per_second=0.01), RunSeconds(), 0)


def test_a_metered_run_ends_where_it_would_be_paid_for_no_more() -> None:
    known, terms = RunSeconds(), FleetPrompts(price_per_second=2)
    assert paid_seconds(asked()) is None
    assert paid_seconds(with_price(asked(), terms, known, 11)) == 5.5
    known.note(asked(), 10.0)
    assert paid_seconds(with_price(asked(), terms, known, None)) == 150
    assert paid_seconds(with_price(asked(), terms, known, 50)) == 25
    assert paid_seconds(with_price(asked(), terms, known, 9_999)) == 150


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
