"""Rows of a Kafka topic, read from librdkafka's imitation of a broker: each once, committed after it was used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest

from nbdist.recsys.days import follow_kafka

confluent_kafka = pytest.importorskip("confluent_kafka")
SCHEMA = {"user": pl.Int64, "item": pl.String}


@pytest.fixture
def broker() -> Iterator[tuple[Any, dict[str, Any]]]:
    """A producer whose process has the broker, and options for a consumer."""
    producer = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    found = next(iter(producer.list_topics("log", timeout=30).brokers.values()))
    yield producer, {"bootstrap.servers": f"{found.host}:{found.port}", "group.id": "days"}


def send(producer: Any, *values: Any) -> None:
    for value in values:
        producer.produce("log", value if isinstance(value, bytes) else json.dumps(value).encode(), partition=0)
    assert producer.flush(30) == 0


def committed(options: dict[str, Any]) -> int:
    """Return the offset from which a consumer would go on that takes the place of one that was killed; below 0: the
    oldest."""
    consumer = confluent_kafka.Consumer(options)
    (found,) = consumer.committed([confluent_kafka.TopicPartition("log", 0)], timeout=30)
    consumer.close()
    return int(found.offset)


def test_rows_are_committed_once_they_were_used(broker: tuple[Any, dict[str, Any]]) -> None:
    producer, options = broker
    send(producer, *({"user": number, "item": f"é{number}", "other": []} for number in range(5)))
    frames = follow_kafka("log", SCHEMA, options, max_rows=2, seconds=0.01)
    first = next(frames)
    assert first.rows() == [(0, "é0"), (1, "é1")] and first.schema == pl.Schema(SCHEMA)
    assert committed(options) < 0, "the first is in use"
    assert next(frames)["user"].to_list() == [2, 3] and committed(options) == 2
    assert next(frames)["user"].to_list() == [4], "in time, if not full"
    send(producer, {"user": 7})
    assert next(frames).rows() == [(7, None)] and committed(options) == 5
    frames.close()
    assert committed(options) == 5, "the last was in use"
    assert list(follow_kafka("log", SCHEMA, options, timeout=0)) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"{", r"message 1 of partition \d+ of log must be a JSON object, got b'\{'"),
        ([1], r"message 1 of partition \d+ of log must be a JSON object, got b'\[1\]'"),
        ({"user": "ann"}, r"message 1 of partition \d+ of log must have columns .*, got .*'ann'"),
    ],
)
def test_a_message_that_is_no_row_is_named(broker: tuple[Any, dict[str, Any]], value: Any, message: str) -> None:
    producer, options = broker
    send(producer, {"user": 1}, value)
    with pytest.raises(ValueError, match=message):
        next(follow_kafka("log", SCHEMA, options, max_rows=2))


def test_options_are_checked_early() -> None:
    with pytest.raises(ValueError, match=r"`options` must have 'group.id'"):
        follow_kafka("log", SCHEMA, {"bootstrap.servers": "127.0.0.1:9"})
    with pytest.raises(ValueError, match="`max_rows` must be at least 1"):
        follow_kafka("log", SCHEMA, {}, max_rows=0)
