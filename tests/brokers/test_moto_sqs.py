"""The stand-in for SQS does what AWS documents of FIFO queues.

Order after a time-out, waiting for a locked group, and receipts that ran out fail on moto as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError

from tests.brokers.server_sqs import REGION, SqsServer

pytestmark = pytest.mark.brokers
pytest_plugins = ["tests.brokers.sqs_tools"]
FIFO = {"FifoQueue": "true", "VisibilityTimeout": "30"}


@pytest.fixture
async def client(sqs: SqsServer) -> AsyncIterator[Any]:
    async with get_session().create_client(
        "sqs", region_name=REGION, endpoint_url=f"http://127.0.0.1:{sqs.port}"
    ) as opened:
        yield opened


@pytest.fixture
async def queue(client: Any, prefix: str) -> str:
    made = await client.create_queue(QueueName=f"{prefix}plain.fifo", Attributes=FIFO)
    return str(made["QueueUrl"])


async def send(client: Any, queue: str, *bodies: str) -> None:
    """Each begins with the letter of its group."""
    for body in bodies:
        await client.send_message(QueueUrl=queue, MessageBody=body, MessageGroupId=body[0], MessageDeduplicationId=body)


async def receive(client: Any, queue: str, **more: Any) -> list[dict[str, Any]]:
    answer = await client.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, **more)
    return list(answer.get("Messages", []))


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["Body"] for message in messages]


async def test_a_group_that_becomes_visible_again_comes_in_its_order(sqs: SqsServer, client: Any, queue: str) -> None:
    await send(client, queue, "A1", "A2", "A3", "B1")
    assert bodies(await receive(client, queue)) == ["A1", "A2", "A3", "B1"]
    sqs.order("expire")
    assert bodies(await receive(client, queue)) == ["A1", "A2", "A3", "B1"]


async def test_a_group_is_locked_while_one_of_it_is_in_flight(client: Any, queue: str) -> None:
    await send(client, queue, "A1")
    first = await receive(client, queue)
    await send(client, queue, "A2", "B1")
    assert bodies(await receive(client, queue)) == ["B1"]
    await client.delete_message(QueueUrl=queue, ReceiptHandle=first[0]["ReceiptHandle"])
    assert bodies(await receive(client, queue)) == ["A2"]


async def test_who_waits_gets_nothing_of_a_group_that_somebody_took_meanwhile(client: Any, queue: str) -> None:
    waiting = [asyncio.create_task(receive(client, queue, WaitTimeSeconds=2)) for _ in range(2)]
    await send(client, queue, "A1", "A2", "A3")
    found = [bodies(await one) for one in waiting]
    assert sorted(found)[0] == []
    assert sorted(found)[1][0] == "A1"


async def test_a_receipt_that_ran_out_deletes_nothing(sqs: SqsServer, client: Any, queue: str) -> None:
    await send(client, queue, "A1")
    receipt = (await receive(client, queue))[0]["ReceiptHandle"]
    sqs.order("expire")
    answer = await client.delete_message_batch(QueueUrl=queue, Entries=[{"Id": "0", "ReceiptHandle": receipt}])
    assert [failed["Code"] for failed in answer["Failed"]] == ["ReceiptHandleIsInvalid"]
    assert bodies(await receive(client, queue)) == ["A1"]


async def test_nothing_is_lost_that_is_sent_while_others_are_deleted(client: Any, queue: str) -> None:
    names = [f"{letter}{number}" for number in range(5) for letter in "ABCDEFGH"]

    async def take_all() -> list[str]:
        taken: list[str] = []
        while len(taken) < len(names):
            for message in await receive(client, queue, WaitTimeSeconds=2):
                taken.append(message["Body"])
                await client.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
        return taken

    taking = asyncio.create_task(take_all())
    await asyncio.gather(
        *(send(client, queue, *[name for name in names if name[0] == letter]) for letter in "ABCDEFGH")
    )
    async with asyncio.timeout(30):
        taken = await taking
    assert sorted(taken) == sorted(names)
    assert [name for name in taken if name[0] == "C"] == [name for name in names if name[0] == "C"]


async def test_what_was_acknowledged_survives_the_death_of_the_front(sqs: SqsServer, client: Any, queue: str) -> None:
    await send(client, queue, "A1")
    sqs.kill()
    with pytest.raises(BotoCoreError):
        await receive(client, queue)
    sqs.start()
    assert bodies(await receive(client, queue)) == ["A1"]
