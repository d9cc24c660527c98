"""Item titles for people, read from the model bundle that the stack serves; ids alone where there is none."""

from pathlib import Path


def read_titles(bundle: Path) -> dict[str, str]:
    """Item id -> title of every item that has one; empty when `bundle` cannot be read (titles are a courtesy)."""
    from services.algorithms.bundle import BundleError, load_bundle

    try:
        opened = load_bundle(bundle, verify=False)
        return {item_id: title for item_id, title in zip(opened.item_ids, opened.titles, strict=True) if title}
    except (BundleError, OSError):
        return {}
