"""`freshet index` and `freshet search-vectors`: a bundle of external embeddings, and a search in it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from services.cli import client, options
from services.cli.options import filters
from services.cli.output import answer, echo, json_command, sentences, usage_error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from freshet.v1 import common_pb2

    from services.algorithms.indexes.quantized.codebooks import Codebooks
    from services.algorithms.scoring.states import ItemStates


@json_command
def index(
    vectors: Annotated[
        Path, Argument(help="A Parquet table: item_id, vector; optionally title, categories, and attributes.")
    ],
    *,
    out: Annotated[Path, Option(help="The bundle's folder.")] = options.DEFAULT_BUNDLE,
    normalize: Annotated[bool, Option("--normalize", help="Scale every vector to length 1: cosines.")] = False,
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
        echo(f"{num_items:,} items of width {width}: bundle {out}, model {bundle.model_version}")
        if codebooks is None:
            echo("no codebooks for `anisotropic`: learning them needs PyTorch (extra train)", style="dim")
        echo(f"serve it:  FRESHET_BUNDLE={out} freshet serve candidates", style="dim")

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


@json_command
@filters
def search_vectors(
    vectors: Annotated[Path, Argument(help="A .npy file of query vectors (n, d), or one (d,).")],
    *,
    row: Annotated[int, Option(min=0, help="Which of the query vectors.")] = 0,
    k: Annotated[int, Option(help="How many items, 1-10,000.")] = 10,
    algorithm: Annotated[str, Option(help="A loaded algorithm; default: the first that finishes in time.")] = "",
    allowed: "common_pb2.Filter",
    candidates: options.Candidates = options.DEFAULT_CANDIDATES,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """Search an index that `freshet index` made by your own vector.

    Example:  freshet search-vectors queries.npy --row 3 --k 10
    """
    client.check_k(k, most="10000")
    vector = _read_vector(vectors, row)
    from freshet.v1 import candidates_pb2, common_pb2
    from freshet_client.wire import read

    with client.process("candidates", candidates) as stub:

        def ask(method: Any, request: Any) -> Any:
            return client.call(method, request, target=candidates, timeout_s=timeout_ms / 1000, process="candidates")

        info = ask(stub.GetIndexInfo, candidates_pb2.GetIndexInfoRequest())
        found = ask(
            stub.Search,
            candidates_pb2.SearchRequest(
                query_state=common_pb2.QueryState(
                    model_version=info.model_version,
                    components=vector.astype("<f2").tobytes(),
                    num_components=1,
                    component_width=len(vector),
                ),
                k=k,
                stage=candidates_pb2.STAGE_FULL,
                filter=allowed,
                algorithm=algorithm,
            ),
        )
    proof, items = read(found.certificate), list(zip(found.item_ids, found.scores, strict=True))

    def shown() -> None:
        for item_id, score in items:
            echo(f"{score:10.6f}  {item_id}")
        gap = f", at most {proof.gap:.6f} off" if proof.kind == "bounded" else ""
        echo(f"{proof.kind}{gap}; {found.algorithm} on index {found.index_version}", style="dim")
        for one in found.passes:
            echo(f"{one.milliseconds:8.3f} ms  {one.name}: {one.items_touched:,} items", style="dim")

    facts = {
        "items": [{"item_id": item_id, "score": score} for item_id, score in items],
        "certificate": {"kind": proof.kind, "gap": proof.gap},
        "algorithm": found.algorithm,
        "index_version": found.index_version,
        "passes": [
            {"name": one.name, "milliseconds": one.milliseconds, "items_touched": one.items_touched}
            for one in found.passes
        ],
    }
    answer(facts, shown)


def _read_vector(path: Path, row: int) -> "npt.NDArray[np.float32]":
    """Return row `row` of a .npy file, (d,). Its values must fit half precision, in which query states are sent."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise usage_error(f"{path}: not a .npy file of numbers ({error})", "np.save('queries.npy', vectors)") from error
    if found.ndim == 1:
        found = found[None]
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.floating):
        raise usage_error(f"{path} holds {found.dtype} of shape {found.shape}; expected floating-point (n, d)")
    if row >= len(found):
        raise usage_error(f"row={row} allowed: 0-{len(found) - 1}")
    vector = np.asarray(found[row], dtype=np.float32)
    with np.errstate(over="ignore"):
        in_half = vector.astype(np.float16)
    if not np.isfinite(in_half).all():
        raise usage_error(f"{path} row {row} holds values that half precision can't: every |value| below 65504")
    return vector
