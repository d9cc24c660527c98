"""Addresses of the pages, with what they show."""

from urllib.parse import urlencode


def try_link(user_id: str) -> str:
    """The list of a user, to try."""
    return f"/?{urlencode({'user': user_id})}"


def user_link(user_id: str) -> str:
    """What is stored of a user."""
    return f"/user?{urlencode({'user': user_id})}"


def why_link(user_id: str, item_id: str) -> str:
    """Why a user gets an item, or does not."""
    return f"/why?{urlencode({'user': user_id, 'item': item_id})}"


def experiment_link(name: str) -> str:
    """What differs between the arms of an experiment."""
    return f"/experiments?{urlencode({'name': name})}"


def results_link(name: str, metric: str = "", part: str = "") -> str:
    """The results of an experiment."""
    chosen = {"name": name, "metric": metric, "part": part}
    return f"/results?{urlencode({key: value for key, value in chosen.items() if value})}"


def items_link(**fields: str) -> str:
    """Items, by `item`, `prefix`, `category` and `newest`; empty ones are left out."""
    return f"/items?{urlencode({name: value for name, value in fields.items() if value})}"
