"""The model inside the encoder process: PyTorch's states, whether a window is encoded whole or gone on with."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.encoder import MemoryOutbox, MemoryStream
from onnx import TensorProto, helper
from streams import NOW_MS

from services.algorithms.bundles.model_manifest import EncoderShape, HeadShape
from services.contracts.topics.attributions import Attribution
from services.contracts.topics.interactions import Interaction, encode_interaction
from services.encoder.adapters.in_process import InProcessEncoder
from services.encoder.domain import EncodedStates, EncodeJob, Vocabulary
from services.encoder.handlers.apply_records import ApplyRecords
from services.offline.backfill.memory_store import MemoryStore
from services.offline.training.export import write_onnx
from services.offline.training.models.sequential import SequentialModel
from services.offline.training.step_export import write_step_onnx
from services.platform.errors import PreconditionFailed

L, NUM_ITEMS = 16, 23
SHAPE = EncoderShape(
    kind="hstu",
    num_blocks=1,
    num_heads=2,
    width=12,
    d_qk=5,
    d_v=7,
    max_history=L,
    num_time_buckets=64,
    uses_user_index=True,
)
HEAD = HeadShape(kind="mol", num_query_components=3, num_item_components=2, component_width=4, tau=0.05, gate_hidden=5)


@pytest.fixture(scope="module")
def model() -> SequentialModel:
    torch.manual_seed(0)
    model = SequentialModel(SHAPE, HEAD, num_items=NUM_ITEMS, num_users=4).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def files(model: SequentialModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("onnx")
    write_onnx(model, folder / "encoder.onnx")
    write_step_onnx(model, folder / "step.onnx")
    return folder / "encoder.onnx", folder / "step.onnx"


@pytest.fixture
def encoder(files: tuple[Path, Path]) -> InProcessEncoder:
    return InProcessEncoder(*files, max_history=L, cache_bytes=1 << 20)


def job_of(rng: np.random.Generator, length: int, *, key: int | None = None) -> EncodeJob:
    times = np.sort(rng.integers(10**9, 10**9 + 10**7, length))
    items = rng.integers(0, NUM_ITEMS, length)
    positions = sorted({length - 1, length // 2})
    return EncodeJob(items, times, int(rng.integers(-1, 4)), positions, cache_key=key)


@torch.no_grad()
def assert_pytorchs(model: SequentialModel, job: EncodeJob, states: EncodedStates) -> None:
    items, times = torch.from_numpy(job.item_index)[None], torch.from_numpy(job.event_time)[None]
    components, gate = model.states_at(
        items, times, torch.tensor([job.user_index]), torch.tensor([list(job.positions)])
    )
    assert gate is not None
    assert states.gate is not None
    np.testing.assert_allclose(states.components, components[0].numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(states.gate, gate[0].numpy(), rtol=0, atol=1e-4)


def test_jobs_of_unlike_lengths_with_and_without_keys_get_pytorchs_states(
    model: SequentialModel, encoder: InProcessEncoder
) -> None:
    rng = np.random.default_rng(0)
    jobs = [job_of(rng, 1 + number % 15, key=number % 4 if number % 3 else None) for number in range(30)]
    for job, states in zip(jobs, encoder.encode(jobs), strict=True):
        assert_pytorchs(model, job, states)


def test_a_growing_history_is_gone_on_with_and_a_dropped_one_is_not(
    model: SequentialModel, encoder: InProcessEncoder
) -> None:
    encoder.check()
    whole = job_of(np.random.default_rng(1), 15)
    for length in (10, 11, 13, 15):
        job = EncodeJob(whole.item_index[:length], whole.event_time[:length], 1, [length - 2, length - 1], cache_key=7)
        assert_pytorchs(model, job, encoder.encode([job])[0])
    counts = encoder.cache_counts()
    assert (counts.hits, counts.misses) == (3, 1)
    assert counts.bytes > 0
    encoder.drop([7, 8])
    assert encoder.cache_counts().bytes == 0


def test_without_a_step_graph_every_job_is_encoded_whole(model: SequentialModel, files: tuple[Path, Path]) -> None:
    encoder = InProcessEncoder(files[0], None, max_history=L, cache_bytes=1 << 20)
    job = job_of(np.random.default_rng(2), 9, key=3)
    assert_pytorchs(model, job, encoder.encode([job])[0])
    encoder.drop([3])
    assert encoder.cache_counts().misses == 0


def test_a_file_that_is_no_model_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "encoder.onnx").write_bytes(b"no model")
    encoder = InProcessEncoder(tmp_path / "encoder.onnx", None, max_history=L, cache_bytes=0)
    with pytest.raises(PreconditionFailed, match=r"encoder\.onnx cannot be loaded"):
        encoder.check()


@pytest.mark.parametrize(("value", "length"), [(float("nan"), "nan"), (3e38, "inf"), (1.01, "1.01")])
def test_states_that_are_not_of_length_1_are_refused(tmp_path: Path, value: float, length: str) -> None:
    names = ("item_index", "event_time", "position")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in names]
    nan = helper.make_tensor("nan", TensorProto.FLOAT, [1, 1, 1, 2], [0.0, value])
    output = helper.make_tensor_value_info("components", TensorProto.FLOAT, [1, 1, 1, 2])
    node = helper.make_node("Constant", [], ["components"], value=nan)
    graph = helper.make_graph([node], "broken", inputs, [output])
    broken = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "encoder.onnx").write_bytes(broken.SerializeToString())
    encoder = InProcessEncoder(tmp_path / "encoder.onnx", None, max_history=L, cache_bytes=0)
    with pytest.raises(
        PreconditionFailed, match=f"answers components: row 0, component 0 has length {length}; allowed"
    ):
        encoder.check()


def attributed(encoder: InProcessEncoder, batch_size: int) -> dict[tuple[int, int], np.ndarray]:
    """The states that precede each interaction of a stream with late events, undos and slides, by place."""
    vocabulary = Vocabulary(
        model_version="m",
        item_index={f"item-{number}": number for number in range(NUM_ITEMS)},
        user_index={"user-0": 2},
        max_history=L,
    )
    rng = np.random.default_rng(5)
    stream = MemoryStream(num_partitions=1)
    for number in range(160):
        user = f"user-{rng.integers(2)}"
        late = int(rng.integers(1, 6)) if rng.random() < 0.15 else 0
        interaction = Interaction(
            event_id=f"event-{number}",
            user_id=user,
            item_id=f"item-{rng.integers(NUM_ITEMS + 5)}",
            event_time_ms=NOW_MS - 10**9 + 10**6 * (number - late),
            type="click",
            value=1.0,
        )
        if number > 10 and rng.random() < 0.1:
            interaction = Interaction(
                event_id=f"undo-{number}",
                user_id=user,
                item_id="",
                event_time_ms=NOW_MS,
                type="",
                value=0.0,
                undoes_event_id=f"event-{number - int(rng.integers(1, 5))}",
            )
        stream.append(0, user.encode(), encode_interaction(interaction), NOW_MS)
    store, outbox = MemoryStore(), MemoryOutbox()
    handler = ApplyRecords(
        store=store,
        outbox=outbox,
        encoder=encoder,
        vocabulary=vocabulary,
        pseudonym_key=b"key",
        clock_ms=lambda: NOW_MS,
    )
    handler.resync(stream)
    while records := stream.poll(0, batch_size):
        handler.apply(records)
    return {
        (found.partition, found.offset): np.frombuffer(found.state.components, "<f2").astype(np.float32)
        for found in outbox.attributions
        if isinstance(found, Attribution)
    }


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_streams_attributions_are_those_of_whole_encodes(files: tuple[Path, Path], batch_size: int) -> None:
    keeping = InProcessEncoder(*files, max_history=L, cache_bytes=1 << 20)
    whole = attributed(InProcessEncoder(files[0], None, max_history=L, cache_bytes=0), batch_size)
    found = attributed(keeping, batch_size)
    assert found.keys() == whole.keys()
    assert len(found) > 100
    for place, components in found.items():
        # In half precision, where the last place of a component below 1 is worth 0.0005.
        np.testing.assert_allclose(components, whole[place], rtol=0, atol=1e-3)
    assert keeping.cache_counts().hits > 0


class ClosedMeanwhile:
    """A session during whose first run somebody else closes the encoder; it answers which item it saw."""

    def __init__(self, encoder: InProcessEncoder) -> None:
        self._encoder = encoder

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="item_index")]

    def run(self, _: object, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        self._encoder.close()
        return [feeds["item_index"][:, :1, None, None].astype(np.float32) / 4]


def test_what_is_being_encoded_when_the_encoder_is_closed_is_encoded_to_its_end() -> None:
    one = np.zeros(1, dtype=np.int64)
    jobs = [EncodeJob(item_index=one + number, event_time=one, user_index=-1, positions=[0]) for number in range(3)]
    encoder = InProcessEncoder(Path("none"), None, max_history=L, cache_bytes=1 << 20, max_rows=1)
    encoder._session = ClosedMeanwhile(encoder)
    assert [states.components.item() for states in encoder.encode(jobs)] == [0.0, 0.25, 0.5]
    assert encoder._session is None


def test_encoding_leaves_nothing_in_the_home_folder(files: tuple[Path, Path], tmp_path: Path) -> None:
    """ONNX Runtime keeps no device id and no figures for its maker where Freshet loads it."""
    encode = (
        "from pathlib import Path\n"
        "from services.encoder.adapters.in_process import InProcessEncoder\n"
        f"InProcessEncoder(Path({str(files[0])!r}), None, max_history={L}, cache_bytes=0).check()\n"
    )
    # Nothing of this environment: ONNX Runtime keeps quiet by itself where it finds variables of a CI system.
    root = Path(__file__).resolve().parents[3]
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", encode], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert list(tmp_path.rglob("*")) == []
