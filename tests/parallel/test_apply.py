"""Processes on gloo, in float64: a sharded model does what the whole one does."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modelsummary import InputError, Statistics
from tests.parallel import collectives, models, processes
from tests.parallel.expert_models import EXPERT_MODELS

# of a rank: the whole model has no collectives
KEPT = {f"blocks.{number}": ("_c10d_functional.all_reduce.default#0",) for number in range(2)}
EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel_train.py"
SPLIT = ("llama", "bert", "t5", "vit", "hf_llama", "hf_qwen3", "hf_bert", "hf_neox", "hf_t5", "hf_vit")
CHUNKED = ("mixture", "bert", "hf_llama", "hf_qwen3", "hf_bert", "hf_neox", "hf_t5")


def _sharded(rank, _n, cases):
    """Largest differences from the whole model, and collectives that ran beside those of the plan."""

    def moved(collectives):
        # Where chunks are of unequal length, the bytes of the plan are those of the first rank.
        return collectives if rank == 0 else {key: count for key, (count, _) in collectives.items()}

    results = []
    for name, sizes in cases:
        whole, inputs = models.make(name)
        model, _ = models.make(name)  # a copy of "called" would call the layers of the whole model
        plan = Statistics(model, inputs).parallel_plan(**sizes)
        plan.apply(model, plan.device_mesh("cpu"))
        ran = moved(collectives.of_step(model, inputs, processes.loss_of))
        differences = processes.compare(whole, model, inputs)
        results.append(((name, sizes), differences, ran, moved(collectives.of_plan(plan))))
    return results


def _check(results):
    limits = {"output": 1e-12, "grad": 1e-12, "step": 1e-10}
    wrong = []
    for of_rank in results:
        for case, differences, ran, planned in of_rank:
            far = {part: differences[part] for part, limit in limits.items() if not differences[part] <= limit}
            is_planned = ran == planned or case[0] == "list"  # the plan counts tokens that go to all experts in turn
            wrong += [(case, far, ran, planned)] if far or not is_planned else []
    assert wrong == []


gathers_pieces = pytest.mark.skipif(
    torch.__version__ >= "2.7" and torch.__version__ < "2.13", reason="torch 2.11 gathers no strided shards"
)
shards_on_the_cpu = pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP of torch 2.6 does not run on the CPU")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("decoder", {"tensor": 2, "sequence": True}),
        ("decoder", {"tensor": 2, "checkpoint": KEPT}),
        ("odd", {"tensor": 2}),
        ("merged", {"tensor": 2, "sequence": True}),
        pytest.param("fused", {"tensor": 2}, marks=gathers_pieces),
        pytest.param("named", {"tensor": 2, "sequence": True}, marks=gathers_pieces),
        ("mixture", {"expert": 2}),
        ("list", {"expert": 2}),
        pytest.param("local", {"tensor": 2}, marks=gathers_pieces),
        pytest.param("flat", {"shard": 2}, marks=shards_on_the_cpu),
        pytest.param("in_place", {"shard": 2}, marks=shards_on_the_cpu),
    ],
)
def test_two_processes_are_the_model(name, sizes):
    _check(processes.run(_sharded, 2, [(name, sizes)]))


def _asked_later(_rank, _n):
    """Figures of plans before and after they were applied, in a forward of which other ranks have other shapes."""
    model, inputs = models.make("odd")
    plans = [Statistics(model, inputs).parallel_plan(tensor=2) for _ in range(2)]
    before = plans[0].communication, plans[0].memory().peak
    plans[1].apply(model, plans[1].device_mesh("cpu"))
    processes.loss_of(model(*inputs)).backward()
    after = plans[1].communication, plans[1].memory().peak
    processes.loss_of(model(*inputs)).backward()  # the process groups are there again
    return before, after


def test_an_applied_plan_has_its_figures():
    for before, after in processes.run(_asked_later, 2):
        assert before == after


@pytest.mark.slow
def test_idioms_over_two_processes():
    names = ("decoder", "gpt2", "mixture", *SPLIT, "list", "biased", "grouped", "inline", "again", "pairs", "called")
    cases = [(name, {"tensor": 2}) for name in (*names, "hf_dbrx")]
    cases += [(name, {"expert": 2}) for name in ("shared", *EXPERT_MODELS)]
    cases += [(name, {"tensor": 2, "sequence": True}) for name in (*CHUNKED, "fused", "odd")]
    cases += [(name, {"tensor": 2, "checkpoint": "every"}) for name in ("decoder", "gpt2", "bert", "t5")]
    cases += [("hf_qwen3", {"tensor": 2, "sequence": True, "checkpoint": "every"})]
    names = ("decoder", "gpt2", "t5", "bert", "moe", "cnn", "vit", "hf_llama", "captioner", "looped")
    cases += [(name, {"shard": 2}) for name in names]
    cases += [(name, {"shard": 2, "sharded": "gradients"}) for name in ("decoder", "looped")]
    _check(processes.run(_sharded, 2, [*cases, ("decoder", {"data": 2})]))


@pytest.mark.slow
def test_meshes_of_two_dimensions():
    both, copied = {"tensor": 2, "shard": 2}, {"tensor": 2, "data": 2}
    cases = [(name, both) for name in ("decoder", "gpt2", "mixture", *SPLIT, "fused", "odd")]
    cases += [(name, {**both, "sequence": True}) for name in ("decoder", *CHUNKED)]
    cases += [("decoder", copied), ("mixture", copied), ("fused", copied), ("decoder", {"data": 2, "shard": 2})]
    cases += [(name, {"expert": 2, other: 2}) for name in ("mixture", "list") for other in ("tensor", "shard", "data")]
    # The gradient of a bias that experts share is summed over the ranks of "expert".
    cases += [(name, {"expert": 2, other: 2}) for name in ("shared", "shared_bias") for other in ("shard", "data")]
    cases += [("shared_bias", both), ("shared_bias", {"expert": 2, "tensor": 2}), ("odd", {"tensor": 4})]
    cases += [("mixture", {"expert": 2, "tensor": 2, "sequence": True})]
    _check(processes.run(_sharded, 4, cases))


def _pipeline(rank, _n, name, sizes):
    from torch.distributed.pipelining import Schedule1F1B

    model, inputs = models.make(name)
    whole, model = processes.copies(model)
    plan = Statistics(model, tuple(each[:2] for each in inputs)).parallel_plan(**sizes, pipeline=2)
    mesh = plan.device_mesh("cpu")
    stage = plan.apply(model, mesh)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: ((out - target) ** 2).mean())
    target = torch.linspace(0, 1, 4 * 8 * 48).view(4, 8, 48)
    stage_number = mesh["pipeline"].get_local_rank()
    losses = []
    schedule.step(
        *(inputs if stage_number == 0 else ()), **({"target": target, "losses": losses} if stage_number else {})
    )
    loss = sum(
        ((whole(part) - each) ** 2).mean() for part, each in zip(inputs[0].split(2), target.split(2), strict=True)
    )
    (loss / 2).backward()
    expected = dict(whole.named_parameters())
    differences = {
        name: processes.difference(expected[name].grad, processes.whole(each.grad))
        for name, each in stage.submod.named_parameters()
    }
    if losses:
        differences["loss"] = (torch.stack(losses).mean() - loss / 2).abs().item()
    return differences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "numbers"),
    [("decoder", {"tensor": 2}, [18, 18, 20, 20]), ("list", {"expert": 2}, [18, 18, 32, 32])],
)
def test_stages_of_sharded_layers(name, sizes, numbers):
    found = processes.run(_pipeline, 4, name, sizes)
    assert [len(each) for each in found] == numbers
    assert all(value <= 1e-12 for each in found for value in each.values())


def _from_code(_rank, _n):
    found = []
    for name in ("llama", "odd", "fused"):
        model, inputs = models.make(name)
        whole, coded = processes.copies(model)
        plan = Statistics(model, inputs).parallel_plan(tensor=2)
        written: dict[str, object] = {}
        exec(plan.to_code(), written)
        mesh = written["make_mesh"]("cpu")
        written["parallelize"](coded, mesh)
        found.append(processes.compare(copy.deepcopy(whole), coded, inputs))
        if name != "llama":  # columns in pieces and chunks of unequal length, filled from the checkpoint
            empty = copy.deepcopy(model).to("meta")
            empty.head.weight = (empty.wte if name == "fused" else empty.embed).weight  # to() unties them
            plan.apply(empty, mesh, checkpoint=model.state_dict())
            found.append(processes.compare(whole, empty, inputs))
    return found


def _on_meta(_rank, _n):
    model, inputs = models.make("gpt2")
    with torch.device("meta"):
        empty = type(model)(depth=2)
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        empty.get_submodule(owner).register_buffer(attribute, buffer, persistent=False)
    plan = Statistics(model, inputs).parallel_plan(tensor=2)
    mesh = plan.device_mesh("cpu")
    try:
        plan.apply(type(model)(depth=2).to("meta"), mesh)
    except InputError as error:
        refusal = str(error)
    plan.apply(empty.double().eval(), mesh, checkpoint=model.state_dict())
    return processes.compare(model, empty, inputs), refusal


@pytest.mark.slow
def test_code_and_models_on_meta():
    for differences in (each for found in processes.run(_from_code, 2) for each in found):
        assert max(differences.values()) <= 1e-10
    for differences, refusal in processes.run(_on_meta, 2):
        assert max(differences.values()) <= 1e-10
        assert "is on meta and has no values" in refusal


def _experts(_rank, _n, folder):
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    found = {}
    for name in ("shared", "list"):
        model, inputs = models.make(name)
        plan = Statistics(model, inputs).parallel_plan(expert=2)
        mesh = plan.device_mesh("cpu")
        whole, coded = processes.copies(model)
        empty = copy.deepcopy(model).to("meta")
        written: dict[str, object] = {}
        exec(plan.to_code(), written)
        written["parallelize"](coded, mesh)
        plan.apply(empty, mesh, checkpoint=model.state_dict())
        differences = processes.compare(copy.deepcopy(whole), empty, inputs), processes.compare(whole, coded, inputs)
        found[name] = (differences, whole.state_dict())
        checkpoints.save(get_model_state_dict(coded), checkpoint_id=f"{folder}/{name}")
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # this process loads what two have saved
def test_experts_from_code_on_meta_and_in_checkpoints(tmp_path):
    import torch.distributed.checkpoint as checkpoints

    for name, (differences, trained) in processes.run(_experts, 2, tmp_path)[0].items():
        assert max(value for each in differences for value in each.values()) <= 1e-12
        # The experts of both ranks are there, under the names of the whole model.
        state = {key: torch.full_like(each, torch.nan) for key, each in trained.items()}
        checkpoints.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert all((state[key] - each).abs().max() <= 1e-12 for key, each in trained.items())


def _wrong_mesh(_rank, _n):
    from torch.distributed.device_mesh import init_device_mesh

    model, inputs = models.make("decoder")
    errors = []
    plan = Statistics(model, inputs).parallel_plan(tensor=2)
    for attempt in (
        lambda: plan.apply(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))),
        lambda: Statistics(model, inputs).parallel_plan(tensor=2, shard=2).device_mesh("cpu"),
        lambda: plan.apply(models.cnn(), plan.device_mesh("cpu")),
    ):
        try:
            attempt()
        except InputError as error:
            errors.append(str(error))
    return errors


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    names, ranks, model = processes.run(_wrong_mesh, 2)[0]
    assert names == "the plan needs a mesh of {'tensor': 2}, got {'tp': 2}; use plan.device_mesh('cpu')"
    assert ranks == "the plan is for 4 ranks, but the process group has 2; run it under torchrun with as many"
    assert model == "the plan of a Decoder names 'embed', which this model does not have"


def _torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(EXAMPLE), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


@pytest.mark.slow
def test_the_example_trains_saves_and_loads():
    result = _torchrun()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("largest difference of a weight") == 4


@pytest.mark.slow
def test_when_a_rank_dies_the_others_end():
    result = _torchrun("--dies", "2")
    assert result.returncode != 0
    assert "largest difference" not in result.stdout
