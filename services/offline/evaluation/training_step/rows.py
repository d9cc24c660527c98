"""`freshet bench training-step`: processor time per position of the mixture's loss, and of whole steps of each head."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.offline.datasets import Interactions, load_dataset
from services.offline.evaluation.catalogues.scene import Shape
from services.offline.evaluation.common.report import Report, Request, filled, report_of, written
from services.offline.evaluation.common.roofline import full_scores, measure_rates
from services.offline.evaluation.common.timing import Times
from services.offline.evaluation.training_step.by_pytorch import mol_sampled_softmax_reference
from services.offline.training.choice import microseconds_per_position
from services.offline.training.mol_sampled_softmax import GateWeights, Negatives, States, mol_sampled_softmax
from services.offline.training.presets import TrainConfig, preset, with_dot_head, with_wide_dot_head

_POSITIONS = 512
_GROUP = 64
_ITEMS = 12_000
_PLAIN = "PyTorch and autograd"
_THINNED = "the kernel, some negatives backward"


def run(request: Request, *, data: list[str]) -> Report:
    """The loss's rows and the steps'; writes training-step.{md,json}. One thread, so that times are of one core."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config, turns = preset("quick", seed=request.seed), 3 if request.quick else 15
        losses = _losses(config, turns)
        steps = [row for name in data for row in _steps(config, name, 1 if request.quick else 5, request.say)]
    finally:
        torch.set_num_threads(threads)
    report = report_of("training-step", request, steps, began)
    return written(request, report | {"losses": losses, "config": config.as_dict()}, page)


def page(report: Report) -> str:
    """training-step.md of a report."""
    return filled(Path(__file__).parent / "page.template.md", **{"remark": "", **report})


def _losses(config: TrainConfig, turns: int) -> list[dict[str, Any]]:
    """The loss and its gradients, each way in turn: µs of processor time per position, the least time, and how far one
    gradient of all inputs is from that in double precision, as a share of its length."""
    head, negatives, kept = config.head, config.num_negatives, config.backward_negatives
    inputs = _inputs(config)
    ways: dict[str, Callable[[], Tensor]] = {
        _PLAIN: lambda: _loss(mol_sampled_softmax_reference, inputs, config).sum(),
        "the kernel, every negative": lambda: _loss(mol_sampled_softmax, inputs, config),
        _THINNED: lambda: _loss(mol_sampled_softmax, inputs, config, backward_negatives=kept),
    }
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs[0]], inputs[1]
    exact = _joined(torch.autograd.grad(_loss(mol_sampled_softmax_reference, doubles, config).sum(), doubles[0]))
    times, deviation = {name: Times() for name in ways}, dict[str, float]()
    for turn in range(turns + 1):
        for name, way in ways.items():
            counted = times[name] if turn else Times()
            found = _joined(counted.call(lambda loss: torch.autograd.grad(loss(), inputs[0]), way))
            deviation[name] = float((found - exact).norm() / exact.norm())
    shape = Shape(
        name="step",
        num_items=_ITEMS,
        num_query_components=head.num_query_components,
        num_item_components=head.num_item_components,
        component_width=head.component_width,
        gate_hidden=head.gate_hidden,
    )
    rates = measure_rates()
    forward = full_scores(shape, num_queries=1, num_items=negatives)
    # Each product of matrices has two in the backward pass; activations are taken as kept.
    backward = replace(forward.times(2), exponentials=0.0)
    microseconds = {name: 1e3 * found.cpu_ms / _POSITIONS for name, found in times.items()}
    return [
        {
            "way": name,
            "microseconds": round(value, 1),
            "factor": round(value / microseconds[_PLAIN], 3),
            "deviation": float(f"{deviation[name]:.2g}"),
            "floor": round(
                1e6 * rates.seconds(forward + backward.times(kept / negatives if name == _THINNED else 1)), 1
            ),
        }
        for name, value in microseconds.items()
    ]


def _inputs(config: TrainConfig) -> tuple[list[Tensor], Negatives]:
    head, generator = config.head, torch.Generator().manual_seed(config.seed)
    pairs, width, hidden = head.num_pairs, head.component_width, head.gate_hidden

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = [
        0.3 * random(_POSITIONS),
        functional.normalize(random(_POSITIONS, head.num_query_components, width), dim=-1),
        random(_POSITIONS, pairs),
        functional.normalize(random(_ITEMS, head.num_item_components, width), dim=-1),
        random(_ITEMS, pairs),
        0.3 * random(hidden, pairs),
        0.1 * random(hidden),
        0.1 * random(pairs, hidden),
        0.1 * random(pairs),
    ]
    rows = torch.randint(_ITEMS, (_POSITIONS // _GROUP, config.num_negatives), generator=generator)
    targets = torch.randint(_ITEMS, (_POSITIONS,), generator=generator)
    return [tensor.requires_grad_() for tensor in tensors], Negatives(rows, targets, _GROUP)


def _loss(way: Callable[..., Tensor], inputs: tuple[list[Tensor], Negatives], config: TrainConfig, **of: int) -> Tensor:
    tensors, negatives = inputs
    states = States(*tensors[1:3]), States(*tensors[3:5])
    return way(tensors[0], *states, GateWeights(*tensors[5:]), negatives, tau=config.head.tau, **of)


def _joined(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def _steps(config: TrainConfig, name: str, turns: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Whole steps of each head in turn, medians of turns."""
    interactions: Interactions = load_dataset(name)
    heads = {"dot product": with_dot_head(config), "wide dot product": with_wide_dot_head(config), "mixture": config}
    found: dict[str, list[float]] = {head: [] for head in heads}
    for turn in range(turns):
        say(f"{name}: turn {turn + 1} of {turns}")
        for head, of in heads.items():
            found[head].append(microseconds_per_position(of, interactions))
    medians = {head: sorted(values)[len(values) // 2] for head, values in found.items()}
    return [
        {
            "data": interactions.name,
            "head": head,
            "microseconds": round(value, 1),
            "low": round(min(found[head]), 1),
            "high": round(max(found[head]), 1),
            "factor": round(value / medians["dot product"], 2),
        }
        for head, value in medians.items()
    ]
