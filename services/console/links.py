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
