"""A plan of the cluster in bfloat16 trains as it was costed: products in bfloat16, weights in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import InputError, Statistics
from modelsummary.cluster import Cluster, Plan, Recipe
from tests.parallel import models, processes

CLUSTER = Cluster("A100", devices_per_node=2)


def _model(*, frozen=False):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model, inputs = models.make("decoder")
    model = model.float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or name.startswith("blocks.1"))
    return model, inputs


def _gradients(model, inputs):
    """Gradients in bfloat16 of one process."""
    whole = copy.deepcopy(model).bfloat16()
    processes.loss_of(whole(*inputs)).float().backward()
    return {name: each.grad.float() for name, each in whole.named_parameters() if each.grad is not None}


def _off(expected, parameters):
    """The difference of the gradients, relative to all of them: some are zero but for rounding."""
    pairs = [(processes.whole(parameters[name].grad), grad) for name, grad in expected.items() if name in parameters]
    wrong, right = ([each.norm() for each in every] for every in zip(*((a - b, b) for a, b in pairs), strict=True))
    return float(torch.stack(wrong).norm() / torch.stack(right).norm())


def _all_trained(rank, _n, cases):
    return [_trained(rank, *case) for case in cases]


def _trained(rank, arguments, frozen, coded):
    model, inputs = _model(frozen=frozen)
    expected = _gradients(model, inputs)
    step = Statistics(model, inputs).simulate(Plan(**arguments), CLUSTER, 4)
    mesh = step.parallel_plan().device_mesh("cpu")
    if arguments.get("pipeline", 1) > 1:
        twice = [torch.cat([each, each]) for each in inputs]

        def loss(out, _target):
            return processes.loss_of(out).float()

        if coded:
            scope = {}
            exec(step.to_code(), scope)
            schedule = scope["make_schedule"](model, inputs, loss, 2, "cpu")
            stage = schedule._stage
        else:
            from torch.distributed.pipelining import Schedule1F1B

            stage = step.apply(model, mesh)
            schedule = Schedule1F1B(stage, 2, loss_fn=loss)
        schedule.step(*twice) if rank == 0 else schedule.step(target=torch.zeros(len(twice[0])))
        model = stage.submod
    else:
        if coded:
            scope = {}
            exec(step.to_code(), scope)
            model = scope["parallelize"](model, mesh)
        else:
            step.apply(model, mesh)
        computed = set()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, _, out: computed.add((module.weight.dtype, out.dtype)))
        processes.loss_of(model(*inputs)).float().backward()
        assert computed == {(torch.bfloat16, torch.bfloat16)}
    parameters = dict(model.named_parameters())
    kinds = {(each.requires_grad, each.dtype) for each in parameters.values()}
    assert kinds <= {(True, torch.float32), (False, torch.bfloat16)}
    return _off(expected, parameters)


def test_products_are_in_bfloat16_and_weights_in_float32():
    staged = {"pipeline": 2, "micro_batch": 2}
    cases = [
        ({"tensor": 2}, False, True),
        ({"shard": 2}, True, False),
        (staged, False, True),
    ]
    for found in processes.run(_all_trained, 2, cases):
        assert max(found) < 0.02


def test_what_a_recipe_trains_otherwise_is_refused():
    stats = Statistics(*_model())
    for recipe, message in (
        (
            Recipe(gradient_dtype=torch.bfloat16),
            r"the stored weights, here torch\.float32; pass gradient_dtype=torch\.f",
        ),
        (Recipe(master_weights=False), r"Recipe\(gradient_dtype=torch\.float32\).*, here torch\.bfloat16; pass"),
    ):
        step = stats.simulate(Plan(shard=2), CLUSTER, 4, recipe=recipe)
        with pytest.raises(InputError, match=message):
            step.to_code()
        assert not step.applicable
    step = stats.simulate(Plan(data=2), CLUSTER, 4, recipe=Recipe(precision=None))
    assert step.parallel_plan() == stats.parallel_plan(data=2)  # the model's own float32


def test_batch_norms_in_another_precision_are_refused():
    # F.batch_norm of torch takes a weight and running statistics of one dtype.
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(2, 3, 8, 8)
    norm = model[1]
    with pytest.raises(RuntimeError):
        F.batch_norm(torch.randn(2, 8, 6, 6).bfloat16(), norm.running_mean, norm.running_var, norm.weight.bfloat16())
    with pytest.raises(InputError, match=r"torch refuses 1 \(BatchNorm2d\) with .* use a group norm$"):
        Statistics(model, x).parallel_plan(shard=2, precision=torch.bfloat16)
    assert Statistics(model, x).parallel_plan(shard=2, precision=torch.float32).precision == "float32"
