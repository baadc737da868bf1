"""A workflow is converted once, unless chance or the date has a say in what becomes of it."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from tests.support.jobs.workflows import OBJECT_INFO

from comfyfleet.server.catalog.payload import RandomSource, marked_prompt_of
from comfyfleet.server.jobs.caches import PROMPTS_KEPT_MAX, PromptCache, TtlCache

TODAY = datetime(2026, 11, 15, tzinfo=UTC)


class Conversion:
    """Of a workflow with one text; counts how often it is converted."""

    def __init__(self, kind: str, text: str, *placeholders: str) -> None:
        picture = {
            "id": 2,
            "type": "LoadImage",
            "widgets_values": ["cat.png"],
            "outputs": [{"name": "IMAGE", "type": "IMAGE", "links": [1]}],
        }
        images = [{"name": "images", "type": "IMAGE", "link": 1}] if kind == "SaveImage" else []
        node = {"id": 1, "type": kind, "inputs": images, "outputs": [], "widgets_values": [text]}
        links = [[1, 2, 0, 1, 0, "IMAGE"]] if images else []
        self.document = {"nodes": [picture, node], "links": links, "version": 0.4}
        self.placeholders = list(placeholders)
        self.times = 0

    def __call__(self, chance: RandomSource) -> Mapping[str, Any]:
        self.times += 1
        return marked_prompt_of(
            "workflow", self.document, OBJECT_INFO, self.placeholders, chance=chance
        )


def texts_of(conversion: Conversion, name: str, times: int) -> set[str]:
    prompts, dice = PromptCache(), Random(7)
    return {
        prompts.get("key", conversion, RandomSource(TODAY, dice))["1"]["inputs"][name]
        for _ in range(times)
    }


def test_a_plain_workflow_is_converted_once() -> None:
    plain = Conversion("CLIPTextEncode", "a photo of {{what}}", "{{what}}")
    assert len(texts_of(plain, "text", 20)) == 1
    assert plain.times == 1


def test_a_choice_of_words_is_made_anew_each_time() -> None:
    varied = Conversion("CLIPTextEncode", "a cat in {oil|chalk}")
    assert texts_of(varied, "text", 20) == {"a cat in oil", "a cat in chalk"}


def test_a_date_is_that_of_the_day() -> None:
    prompts, dated = PromptCache(), Conversion("SaveImage", "%date:yyyy-MM-dd%/cat")
    for day in (15, 16):
        made = prompts.get("key", dated, RandomSource(TODAY.replace(day=day), None))
        assert made["1"]["inputs"]["filename_prefix"] == f"2026-11-{day}/cat"


def test_only_so_many_are_kept_and_the_oldest_goes_first() -> None:
    prompts = PromptCache()
    conversions = [Conversion("SaveImage", f"{number}") for number in range(PROMPTS_KEPT_MAX + 1)]
    for number, each in enumerate(conversions):
        prompts.get(str(number), each, RandomSource())
    prompts.get(str(PROMPTS_KEPT_MAX), conversions[-1], RandomSource())
    prompts.get("0", conversions[0], RandomSource())
    assert [each.times for each in (conversions[0], conversions[-1])] == [2, 1]


class Source:
    """A slow source that counts its reads. Each read returns the number of reads so far."""

    def __init__(self) -> None:
        self.reads = 0
        self.may_finish = asyncio.Event()

    async def read(self) -> int:
        self.reads += 1
        value = self.reads
        await self.may_finish.wait()
        if not value % 3:
            raise RuntimeError("the third read fails")
        return value


async def test_only_one_caller_reads_an_expired_value_again() -> None:
    cache: TtlCache[int] = TtlCache(timedelta(seconds=2))
    source = Source()
    source.may_finish.set()
    assert await cache.get("key", source.read, now=TODAY) == 1
    source.may_finish.clear()
    later = TODAY + timedelta(seconds=3)
    reader = asyncio.create_task(cache.get("key", source.read, now=later))
    await asyncio.sleep(0)
    others = [await cache.get("key", source.read, now=later) for _ in range(5)]
    assert others == [1] * 5
    source.may_finish.set()
    assert await reader == 2
    assert await cache.get("key", source.read, now=later) == 2
    assert source.reads == 2


async def test_a_value_that_could_not_be_read_again_is_dropped() -> None:
    cache: TtlCache[int] = TtlCache(timedelta(seconds=2))
    source = Source()
    source.may_finish.set()
    for seconds in (0, 3):
        await cache.get("key", source.read, now=TODAY + timedelta(seconds=seconds))
    later = TODAY + timedelta(seconds=6)
    with pytest.raises(RuntimeError):
        await cache.get("key", source.read, now=later)
    assert await cache.get("key", source.read, now=later) == 4
