"""Poison: work that cannot succeed, or that is bad for its neighbours; each is ordered as a client would."""

from __future__ import annotations

import asyncio

from tests.chaos.faults import FAULTS, Scene, fault


async def _poison(scene: Scene, extra: str, query: str, *, seconds: float = 12.0, **body: object) -> int:
    op = scene.next_op(f"order-{extra}")
    await scene.clients.order(op, extra=extra, timer_ms=100, **body)
    for _ in range(int(seconds / 0.1)):
        if (found := (await scene.world.ask(query, [op]))[0][0]) > 0:
            return int(found)
        await asyncio.sleep(0.1)
    return 0


RETRIED = "SELECT count(*) FROM duly.executions WHERE entity_id = %s AND name = '{}' AND outcome IN ('{}')"


@fault("poison")
async def poison_raise(scene: Scene) -> int:
    """A job that always raises, and an event that does."""
    account = f"held{scene.rng.randint(1, 200)}"
    op = scene.next_op("order-held")
    await scene.clients.order(op, account=account, poison=True)
    await scene.clients.order(scene.next_op("order-behind"), account=account)
    return await _poison(scene, "chaos.raise", RETRIED.format("chaos.raise", "buried"))


@fault("poison")
async def poison_kill(scene: Scene) -> int:
    """A job that kills its own process; reached when that counted as an attempt."""
    return await _poison(scene, "chaos.kill", RETRIED.format("chaos.kill", "lost"))


@fault("poison")
async def poison_hang(scene: Scene) -> int:
    """A job that never returns; reached when its time limit ended it."""
    return await _poison(scene, "chaos.hang", RETRIED.format("chaos.hang", "retried"))


@fault("poison")
async def poison_block(scene: Scene) -> int:
    """A job that blocks its event loop for longer than the lease; reached when it ended."""
    return await _poison(scene, "chaos.block", RETRIED.format("chaos.block", "done"), seconds=20)


@fault("poison")
async def poison_fail(scene: Scene) -> int:
    """A job that says it will never work."""
    return await _poison(scene, "chaos.fail", RETRIED.format("chaos.fail", "buried"))


ALL_FAULTS = FAULTS  # with those of this file
