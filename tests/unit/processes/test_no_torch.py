"""On the CPU no process that scores loads PyTorch: a fresh interpreter starts them and answers from a bundle."""

import subprocess
import sys
from pathlib import Path

from retrieval_scene import make_bundle

_SCRIPT = """
import sys
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

import services.candidates.__main__
import services.generator.__main__
import services.reranker.__main__
from services.algorithms.scoring.states import QueryStates
from services.candidates.bootstrap import load_catalogue, make_live
from services.candidates.config import CandidatesSettings
from services.candidates.metrics import CandidatesMetrics
from services.reranker import bootstrap as reranker
from services.reranker.config import RerankerSettings

bundle, algorithms = Path(sys.argv[1]), sys.argv[2:]
candidates = CandidatesSettings(port=0, metrics_port=0, bundle=bundle, algorithms=" ".join(algorithms))
live = make_live(candidates, load_catalogue(candidates), CandidatesMetrics(CollectorRegistry()))
catalogue = reranker.load_catalogue(RerankerSettings(port=0, metrics_port=0, bundle=bundle))[0]
generator = np.random.default_rng(0)
queries = QueryStates(
    components=generator.normal(size=(1, 4, 2)).astype(np.float32) / 2,
    gate=generator.normal(size=(1, 8)).astype(np.float32),
)
for algorithm in algorithms:
    answer = live.catalogue.index.version.search(queries, 5, algorithm=algorithm)
    assert len(answer.item_ids[0]) == 5, algorithm
assert catalogue.index.shape == live.catalogue.index.shape
print(sorted(name for name in ("torch", "triton") if name in sys.modules))
"""


def test_no_scoring_process_loads_pytorch_to_answer_on_the_cpu(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", d=2)
    algorithms = [
        "brute_force",
        "exact",
        "exact_algorithm_1",
        "top_k_avg(20)",
        "top_k_per_embedding(20)",
        "combined_top_k(20,20)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "bundle"), *algorithms],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.strip() == "[]", done.stderr
