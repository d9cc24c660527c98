"""`freshet index`: a bundle of external embeddings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.output import answer, console, json_command, sentences

if TYPE_CHECKING:
    from services.algorithms.indexes.quantized.codebooks import Codebooks
    from services.algorithms.scoring.states import ItemStates


@json_command
def index(
    vectors: Annotated[
        Path, typer.Argument(help="A Parquet table: item_id, vector; optionally title, categories, and attributes.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="The bundle's folder.")] = options.DEFAULT_BUNDLE,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale every vector to length 1: cosines.")] = False,
) -> None:
    """Serve your own item vectors by dot product: exact or with a certificate, filtered, audited.

    Then run `FRESHET_BUNDLE=... freshet serve candidates` (without Kafka: FRESHET_CANDIDATES_FOLLOWS_TOPICS=false) and
    search with `freshet search-vectors`. With PyTorch the command also trains codebooks for the algorithm
    `anisotropic`.

    Example:  freshet index items.parquet --out .freshet/mine
    """
    import numpy as np

    from services.algorithms.bundles.model_bundle import HeadShape
    from services.algorithms.scoring.states import ItemStates
    from services.offline.bundles.model import BundleContent, write_bundle
    from services.offline.datasets.item_vectors import read_item_vectors

    with sentences(bad_bundle=""):
        items = read_item_vectors(vectors, normalize=normalize)
        num_items, width = items.vectors.shape
        states = ItemStates(components=items.vectors[:, None, :])
        codebooks = _codebooks(states)
        bundle = write_bundle(
            out,
            BundleContent(
                encoder=None,
                # Similarity units are the dot products themselves.
                head=HeadShape(
                    kind="dot", num_query_components=1, num_item_components=1, component_width=width, tau=1.0
                ),
                weights={},
                item_states=states,
                pair_gate=None,
                item_ids=items.item_ids,
                titles=items.titles,
                categories=items.categories,
                attributes=items.attributes,
                codebooks=codebooks,
                counts=np.zeros(num_items, dtype=np.int64),
                data={"source": vectors.name, "normalized": normalize},
            ),
        )

    def shown() -> None:
        console().print(f"{num_items:,} items of width {width}: bundle {out}, model {bundle.model_version}")
        if codebooks is None:
            console().print("no codebooks for `anisotropic`: learning them needs PyTorch (extra train)", style="dim")
        console().print(f"serve it:  FRESHET_BUNDLE={out} freshet serve candidates", style="dim")

    facts = {"bundle": str(out), "model_version": bundle.model_version, "num_items": num_items, "width": width}
    answer({**facts, "codebooks": codebooks is not None}, shown)


def _codebooks(items: "ItemStates") -> "Codebooks | None":
    try:
        from services.offline.training.codebooks.inverted_file import catalogue_codebooks
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    return catalogue_codebooks(items, None)
