"""Debezium's messages of a shop's tables, as writes to Freshet: python debezium.py KAFKA GATEWAY

Rows of `ratings` become interactions, rows of `products` items. A message is committed after its write is durable. One
that is read again counts once: an event's id is made of its row.
"""

import hashlib
import json
import sys
from datetime import datetime

from freshet_client import Client, Interaction, Item
from kafka import KafkaConsumer

PRODUCTS, RATINGS = "shop.public.products", "shop.public.ratings"


def apply(client, topic, key, value):
    """Write one message. Raises: ValueError for one that cannot be mapped; FreshetError as the client."""
    if value is None:  # the tombstone after a delete
        return
    message, key = json.loads(value), json.loads(key)
    message, key = message.get("payload", message), key.get("payload", key)  # converters with schemas.enable=true
    operation, before, after = message["op"], message.get("before"), message.get("after")
    if operation not in ("c", "r", "u", "d"):  # t: truncate, m: a message of the log
        raise ValueError(f"op={operation!r} allowed: c, r, u, d")
    if topic == PRODUCTS:
        client.put_items([item(after) if after else Item(key["id"], withdrawn=True)])
    elif topic == RATINGS:
        if operation in ("u", "d"):
            if not before or before["customer_id"] is None:
                raise ValueError("before=null allowed: a row; ALTER TABLE ratings REPLICA IDENTITY FULL")
            client.undo(str(before["customer_id"]), event_id(before))
        if after:
            client.record(interaction(after))


def item(row):
    """A row of products."""
    return Item(row["id"], row["title"], row["categories"], available=row["active"])


def interaction(row):
    """A row of ratings."""
    time = datetime.fromisoformat(row["rated_at"].replace("Z", "+00:00"))
    user_id, item_id = str(row["customer_id"]), row["product_id"]
    return Interaction(user_id, item_id, "rating", row["stars"], event_time=time, event_id=event_id(row))


def event_id(row):
    """The same for the same content: Debezium repeats messages after a restart."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:32]


def main(kafka, gateway):
    reader = KafkaConsumer(
        *(PRODUCTS, RATINGS), bootstrap_servers=kafka, group_id="shop-to-freshet", enable_auto_commit=False,
        auto_offset_reset="earliest",
    )  # fmt: skip
    with Client(gateway) as client:
        for record in reader:
            apply(client, record.topic, record.key, record.value)
            reader.commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
