"""Calls made while one is under way are made as one."""

from __future__ import annotations

import asyncio

import pytest

from duly.gather import Gather


class Work:
    """Doubles numbers; says what it was given, and waits until it may go on."""

    def __init__(self) -> None:
        self.turns: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, items: list[int]) -> list[int | Exception]:
        self.turns.append(items)
        await self.go.wait()
        if 99 in items:
            raise RuntimeError("all of them")
        return [ValueError(f"{item} is odd") if item % 2 else item * 2 for item in items]


async def started(gather: Gather[int, int], *items: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.ensure_future(gather.ask(item)) for item in items]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_the_first_goes_at_once_and_whoever_comes_meanwhile_goes_together() -> None:
    work = Work()
    gather = Gather(work, most=3)
    tasks = await started(gather, 2) + await started(gather, 4, 6, 8, 10)
    assert work.turns == [[2]]
    work.go.set()
    assert await asyncio.gather(*tasks) == [4, 8, 12, 16, 20]
    assert work.turns == [[2], [4, 6, 8], [10]]


async def test_each_has_its_own_failure() -> None:
    work = Work()
    work.go.set()
    gather = Gather(work)
    tasks = await started(gather, 2) + await started(gather, 3, 4)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(one) for one in found] == ["4", "3 is odd", "8"]


async def test_work_that_raises_fails_for_its_turn_alone() -> None:
    work = Work()
    gather = Gather(work, most=2)
    tasks = await started(gather, 2) + await started(gather, 99, 4, 6)
    work.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(one) for one in found] == ["4", "all of them", "all of them", "12"]


async def test_whoever_is_cancelled_before_its_turn_is_not_worked_on() -> None:
    work = Work()
    gather = Gather(work)
    tasks = await started(gather, 2) + await started(gather, 4, 6)
    tasks[1].cancel()
    work.go.set()
    assert await tasks[2] == 12
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert work.turns == [[2], [6]]


async def test_whoever_is_cancelled_during_its_turn_takes_nobody_along() -> None:
    work = Work()
    gather = Gather(work)
    tasks = await started(gather, 2)
    tasks[0].cancel()
    later = await started(gather, 4)
    work.go.set()
    assert await later[0] == 8


async def test_closing_ends_what_is_under_way_and_lets_go_whoever_waits() -> None:
    work = Work()
    gather = Gather(work)
    tasks = await started(gather, 2) + await started(gather, 4, 6)
    async with asyncio.timeout(10):
        await gather.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in found] == [asyncio.CancelledError] * 3
    assert work.turns == [[2]], "nothing begins after the end"


async def test_too_few_results_are_an_error_that_says_so_to_each() -> None:
    async def forget(items: list[int]) -> list[int | Exception]:
        return [0] * (len(items) - 1)

    gather: Gather[int, int] = Gather(forget)
    async with asyncio.timeout(10):
        found = await asyncio.gather(gather.ask(1), gather.ask(2), return_exceptions=True)
    assert [str(one) for one in found] == ["2 items were answered with 1 results"] * 2
