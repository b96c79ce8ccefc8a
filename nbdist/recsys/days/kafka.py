"""A log in Kafka: the rows of a topic as frames. The position is committed only after a frame was processed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from ...checks import check_count, check_number, shown

_AT_ONCE = 10_000
"""Messages that are asked for together."""
_WAIT = 0.5
"""Seconds until the time is looked at again."""


def follow_kafka(
    topic: str,
    schema: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    max_rows: int = 100_000,
    seconds: float = 60.0,
    timeout: float | None = None,
) -> Iterator[pl.DataFrame]:
    """Yield the rows of a Kafka topic, whose messages are JSON objects, as frames.

    The position in the topic is committed when the next frame is requested, because the work on the previous frame,
    such as `continue_training`, is complete then. A process that is killed before that gets the frame's rows again.

    Args:
        topic: The topic.
        schema: Column → type of polars. A column that a message lacks is null; further keys of a message are ignored.
        options: The options of `confluent_kafka.Consumer`, such as
            ``{"bootstrap.servers": "kafka:9092", "group.id": "clicks"}``. A group without a position begins with the
            oldest message.
        max_rows: The largest number of rows of a frame.
        seconds: The longest time, in seconds, that a frame waits for more rows after its first row.
        timeout: The iteration ends after this number of seconds without a message. None: it never ends.

    Raises:
        ImportError: confluent-kafka is not installed: `pip install "nbdist[kafka]"`.
        TypeError, ValueError: An argument is invalid, or a message is not a JSON object with these columns. The error
            names the message's partition and offset.
        confluent_kafka.KafkaException: The topic cannot be read.

    Examples:
        >>> from confluent_kafka import Producer
        >>> from nbdist.recsys.days import follow_kafka
        >>> producer = Producer({"test.mock.num.brokers": 1})  # librdkafka's own imitation of a broker
        >>> broker = next(iter(producer.list_topics("clicks").brokers.values()))
        >>> for user in ("ann", "bob"):
        ...     producer.produce("clicks", f'{{"user": "{user}"}}')
        >>> _ = producer.flush()
        >>> options = {"bootstrap.servers": f"{broker.host}:{broker.port}", "group.id": "days"}
        >>> for rows in follow_kafka("clicks", {"user": str}, options, max_rows=2, timeout=60):
        ...     print(rows["user"].to_list())
        ...     break
        ['ann', 'bob']
    """
    check_count(max_rows, least=1, name="`max_rows`")
    check_number(seconds, above=0, name="`seconds`")
    if timeout is not None:
        check_number(timeout, name="`timeout`")
    for name in ("bootstrap.servers", "group.id"):
        if name not in options:
            raise ValueError(f"`options` must have {name!r}, got {shown(dict(options))}")
    from confluent_kafka import Consumer

    fixed = {"enable.auto.commit": False, "auto.offset.reset": "earliest"}
    consumer = Consumer({**fixed, **options, "enable.auto.commit": False})
    return _frames(consumer, topic, pl.Schema(schema), max_rows, seconds, timeout)


def _frames(
    consumer: Any, topic: str, schema: pl.Schema, max_rows: int, seconds: float, timeout: float | None
) -> Iterator[pl.DataFrame]:
    with contextlib.closing(consumer):
        consumer.subscribe([topic])
        messages: list[Any] = []
        since = first = time.monotonic()
        while True:
            for message in consumer.consume(min(_AT_ONCE, max_rows - len(messages)), _WAIT):
                since = time.monotonic()
                first = first if messages else since
                messages.append(_checked(message))
            over = timeout is not None and time.monotonic() - since >= timeout
            if messages and (over or len(messages) >= max_rows or time.monotonic() - first >= seconds):
                yield _frame(messages, schema)
                consumer.commit(asynchronous=False)
                messages, since = [], time.monotonic()
            elif over:
                return


def _checked(message: Any) -> Any:
    """Return the message; raise its exception if it reports an error."""
    from confluent_kafka import KafkaException

    if message.error():
        raise KafkaException(message.error())
    return message


def _frame(messages: Sequence[Any], schema: pl.Schema) -> pl.DataFrame:
    """Return the rows of messages. The error for a message without a row names the message."""
    rows: list[dict[str, Any]] = []
    for message in messages:
        try:
            found = json.loads(message.value() or b"")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{_named(message)} must be a JSON object, got {shown(message.value())}")
        rows.append({name: found.get(name) for name in schema})
    try:
        return pl.DataFrame(rows, schema=schema, orient="row")
    except (TypeError, pl.exceptions.PolarsError) as error:
        for message in messages if len(messages) > 1 else ():
            _frame([message], schema)
        raise ValueError(f"{_named(messages[0])} must have columns {dict(schema)}, got {rows[0]}: {error}") from None


def _named(message: Any) -> str:
    return f"message {message.offset()} of partition {message.partition()} of {message.topic()}"
