"""The training loop around a plan: three steps with clipping are those of one process, on every parameter."""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from modelsummary import Statistics
from tests.parallel import models, processes, sweep, training

needs_engine = pytest.mark.skipif(torch.__version__ < "2.13", reason="the engine of torch 2.11 compares strides")


def _check(n, cases):
    for name, sizes in cases:
        for rank in processes.run(training.compared, n, name, sizes):
            assert rank.get("difference", 1.0) <= sweep.TOLERANCE, (name, sizes, rank)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP of torch 2.6 does not run on the CPU")
def test_units_outside_of_the_blocks_train_like_one_process():
    _check(2, [("ends", {"shard": 2}), ("scaled", {"shard": 2, "checkpoint": "every"})])


def test_experts_are_clipped_by_the_norm_over_all_ranks():
    _check(2, [("list", {"expert": 2, "dispatch": "all_reduce"})])


def test_all_ranks_have_gradients_of_experts_that_take_every_token():
    _check(2, [("shared_stacked", {"expert": 2, "dispatch": "all_reduce"})])


@pytest.mark.slow
def test_experts_and_other_dimensions_are_clipped_by_the_norm_over_all_ranks():
    _check(
        4,
        [
            (name, {"expert": 2, "dispatch": "all_reduce", key: 2})
            for name in ("mixture", "list")
            for key in ("tensor", "shard", "data")
        ],
    )
    _check(4, [("shared_stacked", {"expert": 2, "dispatch": "all_reduce", "shard": 2})])


@pytest.mark.slow
def test_parameters_of_several_parts_train_like_one_process_where_fsdp_shards_them_too():
    names = ("encoder", "packed", "alibi", "shared_bias", "mixture")
    _check(4, [(name, {"tensor": 2, "shard": 2}) for name in names])


@needs_engine
@pytest.mark.parametrize("plan", ["tensor", "shard", "zero bubble", "interleaved"])
def test_plans_train_like_one_process(plan):
    (result,) = sweep.run([("fused", plan)])
    assert result["verdict"] == "equal", result


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("plan", training.PLANS)
def test_each_plan_trains_like_one_process_or_is_refused(plan):
    results = list(sweep.run(case for case in sweep.SAMPLE if case[1] == plan))
    assert [result for result in results if result["verdict"] not in ("equal", "refused")] == []


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"pipeline": 2, "shard": 2}, "zb"),
        ({"pipeline": 2, "shard": 2, "sharded": "gradients"}, "zb"),
        ({"pipeline": 2, "data": 2}, "zb"),
        ({"pipeline": 2, "tensor": 2}, "zb"),
        ({"pipeline": 2, "tensor": 2}, "1f1b"),
        ({"tensor": 2, "data": 2}, ""),
        ({"tensor": 2, "shard": 2, "sequence": True}, ""),
    ],
)
def test_plans_of_two_dimensions_train_like_one_process(sizes, schedule):
    # Torch sets whole states only where the ranks of both dimensions divide the vocabularies of 48, 50 and 49 rows.
    names = ("decoder",) if {"tensor", "shard"} <= sizes.keys() else ("decoder", "gpt2", "odd")
    if {"pipeline", "shard"} <= sizes.keys():
        names += ("transformers/llama",)  # a block that writes into a cache is open: its stage calls the layers inside
    for name in names:
        for rank in processes.run(training.compared, 4, name, sizes, schedule):
            assert "refused" in rank or rank["difference"] <= sweep.TOLERANCE, (name, rank)


def _resumed(_rank, _n, name, sizes):
    """Difference from one process of what was saved after two steps, and of parameters after two more from it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    whole, inputs = models.make(name)
    plan = Statistics(whole, inputs).parallel_plan(**sizes)
    first, second = (training.Sharded(plan, models.make(name)[0], fused=True) for _ in range(2))
    expected, batches = training.Loop(whole), [[[training.like(inputs, seed)]] for seed in range(4)]
    for batch in batches[:2]:
        expected.step(batch)
        first.step(batch)
    between = training.worst(whole, first.modules)[0]
    states = state_dict.get_state_dict(first.modules[0], first.optimizer)
    folder = training.saved({"model": states[0], "optimizer": states[1]})
    pair = second.modules[0], second.optimizer
    read = dict(zip(("model", "optimizer"), state_dict.get_state_dict(*pair), strict=True))
    dcp.load(read, checkpoint_id=folder)
    state_dict.set_state_dict(*pair, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    for batch in batches[2:]:
        expected.step(batch)
        second.step(batch)
    return max(between, training.worst(whole, second.modules)[0])


@pytest.mark.slow
def test_chunks_of_unequal_length_are_saved_and_resumed():
    assert max(processes.run(_resumed, 2, "odd", {"tensor": 2})) <= 1e-9
    assert max(processes.run(_resumed, 4, "odd", {"tensor": 2, "shard": 2})) <= 1e-9


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP of torch 2.6 does not run on the CPU")
def test_parameters_without_dimensions_train_and_resume():
    assert max(processes.run(_resumed, 2, "scaled", {"shard": 2})) <= 1e-9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Embedding, four blocks, head. The forward takes a keyword, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, input_ids):
        x = self.tok(input_ids.clamp(min=0))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "scale": 2.0}


def _loss(out, target):
    return F.cross_entropy(out["logits"].flatten(0, 1), target.flatten()) * out["scale"]


def _pipelined(rank, n, schedule, per_rank, boundaries, ties, accumulates=1):
    """Differences of gradients after steps of a schedule whose loss takes the result of the model."""
    torch.manual_seed(0)
    model, whole = Chain(), Chain()
    whole.load_state_dict(model.state_dict())
    for each in (model, whole):
        for one, other in ties:
            each.get_submodule(other).weight = each.get_submodule(one).weight
    ids = torch.randint(0, 32, (8, 5), generator=torch.Generator().manual_seed(0))
    options = {"boundaries": boundaries} if boundaries else {"single_tensor_cuts": True}
    stages = Statistics(model, {"input_ids": ids[:2]}).split(n * per_rank, **options)
    pipeline = stages.schedule(schedule, 4, _loss, device="cpu")
    for _ in range(accumulates):
        pipeline.step(input_ids=ids, target=ids)
        _loss(whole(ids), ids).backward()
    norm = pipeline.clip_grad_norm_(0.1)
    expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    own = [pair for stage in pipeline.stages for pair in stage.submod.named_parameters(remove_duplicate=False)]
    assert all(each.grad is not None for _, each in own), [name for name, each in own if each.grad is None]
    differences = [processes.difference(expected[name].grad, each.grad) for name, each in own]
    return max([*differences, abs(float(norm - expected_norm))])


TIES = [("blocks.0.up", "blocks.1.up"), ("blocks.1.down", "blocks.3.down"), ("tok", "head")]
EACH_BLOCK = ["blocks.1", "blocks.2", "blocks.3"]


@needs_engine
def test_keywords_and_results_of_any_class_in_two_stages_per_rank():
    assert max(processes.run(_pipelined, 2, "interleaved1f1b", 2, EACH_BLOCK, TIES)) <= 1e-12


@needs_engine
def test_gradients_are_accumulated_over_steps_of_a_schedule():
    assert max(processes.run(_pipelined, 2, "zb", 2, EACH_BLOCK, TIES, 2)) <= 1e-12


@needs_engine
@pytest.mark.slow
def test_overlapping_owners_of_shared_weights_and_an_empty_first_stage():
    assert max(processes.run(_pipelined, 4, "1f1b", 1, EACH_BLOCK, TIES)) <= 1e-12
    assert max(processes.run(_pipelined, 4, "zb", 1, ["tok", "blocks.1", "blocks.3"], TIES)) <= 1e-12
    assert max(processes.run(_pipelined, 2, "zbv", 2, ["tok", "blocks.1", "blocks.3"], TIES)) <= 1e-12


def _permuted(_rank, _n):
    """Whether a gradient that does not lie in order is sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), _Permute(), nn.Linear(8, 8))
    x = torch.randn(8, 3, 8, 8)
    stages = Statistics(model, x[:2]).split(2, boundaries=["1"])
    pipeline = stages.schedule("zb", 4, lambda out, _: out.square().mean(), device="cpu")
    pipeline.step(x, target=x)
    gradients = {name: each.grad.clone() for name, each in pipeline.stages[0].submod.named_parameters()}
    model.zero_grad()
    model(x).square().mean().backward()
    return max(processes.difference(model.get_parameter(name).grad, each) for name, each in gradients.items())


class _Permute(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)


@needs_engine
def test_gradients_that_are_not_contiguous_are_sent():
    assert max(processes.run(_permuted, 2)) <= 1e-12


def _parameters_outside(_rank, _n):
    """Outside of a forward, a module returns the same parameters as the optimizer holds."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    plan = Statistics(model, torch.randn(2, 3, 16)).parallel_plan(tensor=2)
    plan.apply(model, plan.device_mesh("cpu"))
    own = {id(each) for each in model.parameters()}
    same = id(model[0].norm.weight) in own and isinstance(model[0].norm.weight, nn.Parameter)
    model(torch.randn(2, 3, 16)).sum().backward()
    return same and model[0].norm.weight.grad is not None and type(model[0].norm).__name__ == "LayerNorm"


def test_parameters_are_themselves_outside_of_forwards():
    assert all(processes.run(_parameters_outside, 2))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.up, self.down = nn.Parameter(torch.ones(8)), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(x)))


def _recomputed(_rank, _n):
    """Difference from one process of the gradient of a parameter that a checkpoint reads again."""
    torch.manual_seed(0)
    whole, x = nn.Sequential(Scaled(), Scaled()), torch.randn(4, 8)
    model = copy.deepcopy(whole)
    plan = Statistics(model, x).parallel_plan(tensor=2, checkpoint="every")
    plan.apply(model, plan.device_mesh("cpu"))
    for each in (whole, model):
        each(x).square().sum().backward()
    return (whole[0].scale.grad - model[0].scale.grad.full_tensor()).abs().max().item()


def test_parameters_of_checkpointed_modules():
    assert max(processes.run(_recomputed, 2)) <= 1e-4


class Recomputes(nn.Module):
    """A model that calls ``checkpoint`` itself, around functions that read parameters of several modules."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.gain, self.options = Scaled(), nn.Parameter(torch.rand(8)), {"use_reentrant": use_reentrant}

    def part(self, x):
        return self.inner.down(F.gelu(self.inner.up(x * self.gain))) * self.inner.scale

    def forward(self, x):
        x = x + checkpoint(self.part, x, **self.options)
        return checkpoint(lambda y: self.inner(y) * self.gain, x, **self.options)


def _recomputed_by_the_model(_rank, _n):
    found = []
    for use_reentrant in (False, True):
        torch.manual_seed(0)
        whole, x = Recomputes(use_reentrant), torch.randn(4, 8, requires_grad=True)
        model, coded, functions = copy.deepcopy(whole), copy.deepcopy(whole), {}
        plan = Statistics(model, x).parallel_plan(tensor=2)
        plan.apply(model, plan.device_mesh("cpu"))
        exec(plan.to_code(), functions)
        functions["parallelize"](coded, plan.device_mesh("cpu"))
        for each in (whole, model, coded):
            each(x).square().sum().backward()
        expected = dict(whole.named_parameters())
        pairs = [(expected[name].grad, each.grad) for part in (model, coded) for name, each in part.named_parameters()]
        found += [processes.difference(one, processes.whole(other)) for one, other in pairs]
    return max(found)


def test_parameters_that_a_checkpoint_of_the_model_reads_again():
    assert max(processes.run(_recomputed_by_the_model, 2)) <= 1e-12


class Reads(Chain):
    """A root that reads a parameter of one block, or penalises the weights of all."""

    def __init__(self, penalty):
        super().__init__()
        self.penalty = penalty

    def forward(self, input_ids):
        out = super().forward(input_ids)["logits"]
        if self.penalty:
            return out.square().mean() + sum(each.square().sum() for each in self.blocks.parameters())
        return out * self.blocks[0].norm.weight.repeat(2)


def _reads(_rank, _n, penalty):
    torch.manual_seed(0)
    model, whole, ids = Reads(penalty), Reads(penalty), torch.arange(10).view(2, 5)
    whole.load_state_dict(model.state_dict())
    plan = Statistics(model, ids).parallel_plan(shard=2)
    plan.apply(model, plan.device_mesh("cpu"))
    for each in (model, whole):
        each(ids).square().mean().backward()
    expected = dict(whole.named_parameters())
    pairs = [(expected[name].grad, processes.whole(each.grad)) for name, each in model.named_parameters()]
    return max(processes.difference(*pair) for pair in pairs), [unit[0] for unit in plan.units], plan.gathered_with_root


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP of torch 2.6 does not run on the CPU")
def test_a_block_whose_parameters_others_read_is_gathered_with_the_root():
    difference, units, reasons = processes.run(_reads, 2, False)[0]
    assert difference <= 1e-12
    assert units == ["tok", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert "Reads reads blocks.0.norm.weight" in reasons["blocks.0"]
    difference, units, _ = processes.run(_reads, 2, True)[0]
    assert difference <= 1e-12
    assert units == ["tok", "head"]


LOOP = Path(__file__).parents[2] / "docs" / "parallel.md"


def _loop_of_the_docs(rank, _n):
    """Largest difference of a parameter after the loop in docs/parallel.md, and of the saved model before its end."""
    from torch.distributed.checkpoint import state_dict

    section = LOOP.read_text(encoding="utf-8").partition("## The training loop")[2]
    code = re.search(r"```text\n(.*?)```", section, re.DOTALL)[1]
    model, whole = models.make("fused")[0], models.make("fused")[0]
    batches = [torch.randint(0, 48, (4, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    path = [tempfile.mkdtemp() + "/states.pt" if rank == 0 else ""]
    dist.broadcast_object_list(path)
    names = {"torch": torch, "F": F, "dist": dist, "Statistics": Statistics, **vars(state_dict)}
    names |= {"model": model, "batches": batches, "path": path[0]}
    exec(code, names)
    optimizer = training.adamw(whole.parameters(), fused=True)
    found = []
    for number, batch in enumerate(batches):
        F.cross_entropy(whole(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            loaded, _ = models.make("fused")
            loaded.load_state_dict(torch.load(path[0])[0])
            found.append(training.worst(whole, [loaded])[0])
    return max(*found, training.worst(whole, [model])[0])


def test_the_loop_of_the_docs():
    assert max(processes.run(_loop_of_the_docs, 2)) <= 1e-9


def _other_sizes_and_compiled(_rank, _n, name, sizes):
    model, inputs = models.make(name)
    whole, _ = models.make(name)
    plan = Statistics(model, inputs).parallel_plan(**sizes)
    plan.apply(model, plan.device_mesh("cpu"))
    (ids,) = inputs
    found = []
    with torch.no_grad():
        for other in (ids.repeat(2, 1), ids.repeat(1, 2)[:3]):
            found.append(processes.difference(whole(other), processes.whole(model(other))))
    compiled = torch.compile(model, backend="aot_eager")
    for each in (whole, compiled):
        for _ in range(2):  # the gradients of two backwards are added
            processes.loss_of(each(ids)).backward()
    expected = dict(whole.named_parameters())
    pairs = [(expected[key].grad, processes.whole(each.grad)) for key, each in model.named_parameters()]
    return max(*found, *(processes.difference(*pair) for pair in pairs))


@pytest.mark.slow
def test_other_sizes_compilation_and_accumulation_after_a_plan():
    for name, sizes in (("decoder", {"tensor": 2}), ("fused", {"tensor": 2}), ("decoder", {"shard": 2})):
        assert max(processes.run(_other_sizes_and_compiled, 2, name, sizes)) <= 1e-12


def _result_with_objects(rank, _n):
    """What ``step`` of torch's schedule returns for a model whose result holds more than tensors."""
    from torch.distributed.pipelining import Schedule1F1B

    model, ids = Chain(), torch.arange(40).view(8, 5) % 32
    plan = Statistics(model, ids[:2]).parallel_plan(pipeline=2)
    stage = plan.apply(model, plan.device_mesh("cpu"))
    out = Schedule1F1B(stage, 4, loss_fn=_loss).step(*([ids] if rank == 0 else []), **({"target": ids} if rank else {}))
    return None if out is None else [tuple(each.shape) for each in out]


@needs_engine
def test_schedules_of_torch_return_the_tensors_of_a_result():
    assert processes.run(_result_with_objects, 2) == [None, [(8, 5, 32)]]


def _averaged(_rank, _n):
    """Differences of averages of the weights, which a loop keeps in a copy, from those of one process."""
    found = []
    for name, sizes in (
        ("gpt2", {"tensor": 2}),
        ("fused", {"tensor": 2}),
        ("biased", {"tensor": 2}),
        ("mixture", {"expert": 2, "dispatch": "all_reduce"}),
    ):
        pair = []
        for is_sharded in (False, True):
            model, inputs = models.make(name)
            if is_sharded:
                plan = Statistics(model, inputs).parallel_plan(**sizes)
                plan.apply(model, plan.device_mesh("cpu"))
            average = AveragedModel(model, avg_fn=lambda old, new, _n: 0.5 * old + 0.5 * new)
            optimizer = training.adamw(model.parameters())
            for _ in range(3):  # the first update copies
                processes.loss_of(model(*inputs)).backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
            with torch.no_grad():
                pair.append(average(*inputs))
        found.append(processes.difference(*map(processes.whole, pair)))
    return max(found)


def test_an_average_of_the_weights_in_a_copy_is_that_of_one_process():
    assert max(processes.run(_averaged, 2)) <= 1e-9


def _penalised(_rank, _n):
    """Whether a penalty on gradients of the input, of which collectives have no derivative, raises."""
    models_of_plans = models.make("inline")[0], nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    for model in models_of_plans:  # some parameters are whole on each rank, or none
        x = models.make("inline")[1][0].clone().requires_grad_()
        plan = Statistics(model, x).parallel_plan(tensor=2)
        plan.apply(model, plan.device_mesh("cpu"))
        torch.autograd.grad(model(x).square().sum(), x)
        with pytest.raises(RuntimeError, match="collectives of a plan have no second derivative"):
            torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return True


def test_second_derivatives_are_refused():
    assert all(processes.run(_penalised, 2))
