"""Calls that come while one is under way are made as one: nobody waits for company, and a crowd costs what one does."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
CLOSE_SECONDS = 2.0


class Gather(Generic[Item, Result]):
    """``work`` gets the items of everybody who waits, and answers each with a result or an exception."""

    def __init__(
        self, work: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]], *, most: int = 200
    ) -> None:
        self._work = work
        self._most = most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Result:
        """This item's result. Whoever is cancelled before its turn is not worked on; during it, nobody hears of it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, answer))
        if self._task is None or self._task.done():
            # In nobody's context: it works for all of them.
            self._task = loop.create_task(self._run(), context=contextvars.Context())
        return await answer

    async def close(self) -> None:
        """End what is under way, and let go whoever waits."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        for _, answer in self._waiting:
            answer.cancel()
        self._waiting = []

    async def _run(self) -> None:
        while self._waiting:
            turn, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            turn = [(item, answer) for item, answer in turn if not answer.done()]
            if turn:
                await self._answer(turn)

    async def _answer(self, turn: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        results: Sequence[Result | Exception]
        try:
            results = await self._work([item for item, _ in turn])
            if len(results) != len(turn):
                raise RuntimeError(f"{len(turn)} items were answered with {len(results)} results")
        except Exception as error:  # noqa: BLE001 - it is raised again where it is awaited
            results = [error] * len(turn)
        except BaseException:
            for _, answer in turn:
                answer.cancel()  # nobody waits for us in vain
            raise
        for (_, answer), result in zip(turn, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
