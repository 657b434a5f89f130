"""The canary of ``modelsummary._torch``: each private name of torch is there, and is still what it was."""

from __future__ import annotations

import ast
import re

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelsummary import _torch
from tests.sources import PACKAGE, parsed

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Attributes that begin with an underscore and are neither the package's nor torch's.
OTHERS = {
    "_asdict _fields _replace": "public methods of named tuples",
    "_exit _getframe _lru_cache_wrapper": "of Python: os, sys, functools",
    "_option_string_actions _ArgumentGroup": "of argparse: known options, and groups of them",
    "_quantize _data": "of quantised caches of transformers and optimum",
    "_experts _is_weight": "marks of the package on tensors",
    "_default_to_fused_or_foreach": "only asked for: an optimizer without it is not torch's",
}
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "swapped")


def _room(path):
    return path.relative_to(PACKAGE).parts[0]


def _defined(tree):
    """The private names that a file defines: functions, classes, variables, attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _attributes(tree):
    """The private attributes that a file reads, sets, or asks for by name, each with the path in front of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            owner, name = node.args[0], node.args[1].value if called in _BY_NAME else ""
        else:
            continue
        if isinstance(name, str) and name.startswith("_") and not name.startswith("__"):
            yield ast.unparse(owner), name


def _imports(tree):
    """The private modules and names of other packages that a file imports, or that code in its texts imports."""
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("modelsummary"):
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            parts = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = re.findall(r"^(?:from|import) +(torch[\w.]*(?: import \w+)?)", node.value)
        for part in parts:
            if any(name.startswith("_") and not name.startswith("__") for name in re.split(r"[. ]", part)):
                yield part


def _files():
    return {path: tree for path, tree in parsed().items() if _room(path) != "_torch"}


def _listed(names):
    return {name for line in names for name in line.split()}


def test_nothing_else_imports_private_parts_of_torch():
    imports = {f"{path.relative_to(PACKAGE)}: {name}" for path, tree in _files().items() for name in _imports(tree)}
    assert imports == set()


def test_nothing_else_names_private_attributes():
    """An attribute of an operator is the operator; another one is the package's, in the list, or another library's."""
    files = _files()
    defined = {room: set() for room in map(_room, files)}
    for path, tree in files.items():
        defined[_room(path)].update(_defined(tree))
    listed = _listed(_torch.ATTRIBUTES.values()) | _listed(OTHERS)
    operators = _listed(_torch.OPERATORS.values())
    unlisted, named = set(), set()
    for path, tree in files.items():
        for owner, name in _attributes(tree):
            named.add(name)
            is_operator = name in operators and owner.rpartition(".")[2] in _torch.OPERATORS
            if not is_operator and name not in listed | defined[_room(path)] and owner != "self":
                unlisted.add(f"{path.relative_to(PACKAGE)}: {owner}.{name}")
    assert unlisted == set()
    assert (listed | operators) - named <= {"_packed_params"}  # the list has no name that nothing reads


def _parameter():
    parameter = torch.ones(2)
    parameter._is_param = True
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _instances():
    graph = torch.fx.Graph()
    x = torch.ones(2, requires_grad=True)
    return {
        "torch.Tensor": [_parameter(), torch.ones(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])],
        "torch.nn.Module": [nn.Linear(2, 2)],
        "torch.nn.LSTM": [nn.LSTM(2, 2)],
        "torch.nn.Conv2d": [nn.Conv2d(1, 1, 1)],
        "torch.UntypedStorage": [torch.ones(2).untyped_storage()],
        "torch.autograd.graph.Node": [(x * x).grad_fn],
        "torch._ops.OpOverload": [torch.ops.aten.add.Tensor],
        "torch.jit.ScriptModule": [torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))],
        "torch.ao.nn.quantized.Linear": [torch.ao.nn.quantized.Linear],
        "torch.distributions.Distribution": [torch.distributions.Distribution],
        "torch.fx.Graph": [graph],
        "torch.fx.graph.CodeGen": [graph._codegen],
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_attributes_of_objects():
    instances = _instances()
    assert instances.keys() == _torch.ATTRIBUTES.keys()
    missing = [
        f"{owner}.{name}"
        for owner, names in _torch.ATTRIBUTES.items()
        for name in names.split()
        if not any(hasattr(instance, name) or name in dir(instance) for instance in instances[owner])
    ]
    assert missing == []


@pytest.mark.parametrize("namespace", _torch.OPERATORS)
def test_operators(namespace):
    operators = getattr(torch.ops, namespace)
    assert all(hasattr(operators, name) for name in _torch.OPERATORS[namespace].split())


@pytest.mark.parametrize("name", _torch.__all__)
def test_names(name):
    if name != "top_saved_tensors_hooks" or TORCH >= (2, 7):
        assert getattr(_torch, name) is not None


@pytest.mark.parametrize(
    "line",
    [
        _torch.RUNNING_BACKWARD,
        _torch.ALL_TO_ALL,
        _torch.STRIDED_SHARD,
        _torch.TREES,
        _torch.CONTEXT_PARALLEL,
        _torch.RING_OPTIONS,
        pytest.param(_torch.COLLECTIVES, marks=pytest.mark.skipif(TORCH < (2, 14), reason="another name before")),
    ],
)
def test_imports_of_written_code(line):
    exec(line, {})


def test_names_imported_when_they_are_used():
    assert _torch.same_for_all() is not None
    assert _torch.fake_store() is not None
    assert torch.ops._c10d_functional.all_reduce is not None
    assert _torch.tensor_metadata(torch.ones(2)).shape == (2,)
    assert any(hasattr(torch.utils.checkpoint, name) for name in _torch.CHECKPOINT_GENERATORS)
    assert TORCH >= (2, 13) or hasattr(torch.utils.checkpoint, _torch.CHECKPOINT_INPUTS)
    assert _hook_of_checkpointing().__qualname__.startswith(_torch.CHECKPOINT_HOOK)


def _hook_of_checkpointing():
    hooks = []

    def function(x):
        hooks.append(_torch.top_saved_tensors_hooks(True) if _torch.top_saved_tensors_hooks else None)
        return x * x

    torch.utils.checkpoint.checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    return hooks[0][0]


def test_switches_tell_what_is_on():
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert _torch.is_any_autocast_enabled()
    assert _torch.number_of_dispatch_modes() == 0
    with TorchDispatchMode():
        assert _torch.number_of_dispatch_modes() == 1
    assert _torch.number_of_function_modes() == 0
    with torch.overrides.TorchFunctionMode():
        assert _torch.number_of_function_modes() == 1
    assert _torch.fake_mode() is None
    with _torch.FakeTensorMode() as mode:
        assert _torch.fake_mode() is mode


def test_what_is_compiled_in_isolation_leaves_nothing():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def forward(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    def state():
        dynamo, entries = torch._dynamo, torch._C._dynamo.eval_frame._debug_get_cache_entry_list(forward.__code__)
        counters = {name: dict(counter) for name, counter in dynamo.utils.counters.items()}
        codes = dynamo.convert_frame.input_codes.seen, dynamo.convert_frame.output_codes.seen
        frames = dynamo.convert_frame.FRAME_COUNTER, dict(dynamo.convert_frame.FRAME_COMPILE_COUNTER)
        kept = dynamo.eval_frame.cached_backends, dynamo.utils.graph_break_reasons, dynamo.utils.guard_failures
        return len(entries), counters, *map(len, (*codes, *kept)), *frames, dynamo.trace_rules.SKIP_DIRS_RE

    compiled = torch.compile(forward, backend=backend)
    compiled(torch.ones(2))
    assert len(graphs) == 2
    before = state()
    for size in (3, 4):  # sizes that would make the user's next graphs dynamic
        with _torch.isolated_compiling():
            assert torch.compile(forward, backend=backend)(torch.ones(size)).tolist() == [4.0] * size
    assert len(graphs) == 6
    assert state() == before
    compiled(torch.ones(2))  # does not compile again
    assert len(graphs) == 6
    with pytest.raises(ZeroDivisionError), _torch.isolated_compiling():
        torch.compile(lambda x: x / (1 // 0), backend=backend)(torch.ones(2))
    assert state() == before


def test_the_dispatcher():
    assert _torch.has_kernel("aten::mm")
    assert not _torch.has_kernel("aten::no_such_operator")
    assert _torch.has_kernel_for("aten::linear", "CompositeImplicitAutograd")
    assert not _torch.has_kernel_for("aten::mm", "CompositeImplicitAutograd")
    assert not _torch.is_excluded(_torch.DispatchKey.Python)
    with _torch.DisableTorchDispatch():
        assert _torch.is_excluded(_torch.DispatchKey.Python)


def test_autograd():
    first = _torch.next_node_number()
    y = nn.Linear(2, 2)(torch.ones(1, 2)).exp()
    assert y.grad_fn._sequence_nr() >= first
    assert _torch.next_node_number() > y.grad_fn._sequence_nr()
    assert (_torch.running_backward(), _torch.current_node()) == (-1, None)
    seen = []
    y.register_hook(lambda _: seen.append(_torch.running_backward()))
    y.sum().backward()
    assert seen != [-1]


def test_kernels_of_convolutions():
    x, weight = torch.ones(1, 2, 8, 8), torch.ones(4, 2, 3, 3)
    backend = _torch.select_conv_backend(x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    assert _torch.conv_memory_format(x, weight, backend) in (torch.contiguous_format, torch.channels_last)


def test_dispatch_keys_are_restored():
    before = torch._C._dispatch_tls_local_include_set().raw_repr()
    x = torch.ones(2, requires_grad=True)
    with _torch.meta_kernels():
        assert torch._C._dispatch_tls_local_include_set().raw_repr() != before
        assert _torch.is_excluded(_torch.DispatchKey.Python)
        assert not (x * 2).requires_grad
    assert torch._C._dispatch_tls_local_include_set().raw_repr() == before
    nn.Linear(2, 2)


def test_flags_of_tensors():
    x = torch.ones(2, dtype=torch.complex64)
    _torch.set_conj(x, True)
    assert x.is_conj()
    y = torch.ones(2)
    _torch.set_neg(y, True)
    assert y.is_neg()
    assert "shape" in vars(_torch.TensorBase)


def test_the_serializer_knows_dtypes():
    assert torch.float32 in _torch.serialized_dtypes().values()


@pytest.mark.skipif(TORCH < (2, 10), reason="a fake process group of older versions runs no FSDP")
def test_the_parameters_that_fsdp_gathers():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from modelsummary.parallel.applied_rank import fake_world

    model = nn.Linear(4, 2)
    assert _torch.fsdp_groups(model) == []
    with fake_world(0, 2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        (group,) = _torch.fsdp_groups(model)
        weight, bias = group.fsdp_params
        assert weight.sharded_param is model.weight
        assert bias._sharded_param_data.shape == (1,)


def test_process_groups_come_back(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from modelsummary.parallel.applied_rank import fake_world

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        groups = [dist.group.WORLD, dist.new_group([0]), init_device_mesh("cpu", (1,)).get_group()]
        names = [group.group_name for group in groups]
        with fake_world(1, 4):
            assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
            assert init_device_mesh("cpu", (4,)).size() == 4
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert [group.group_name for group in groups] == names
        for group in groups:
            dist.all_reduce(torch.ones(2), group=group)
            collectives = torch.ops._c10d_functional
            reduced = collectives.wait_tensor(collectives.all_reduce(torch.ones(2), "sum", group.group_name))
            assert reduced.tolist() == [1.0, 1.0]  # found by its name
        assert dist.new_group([0]).group_name not in names
    finally:
        dist.destroy_process_group()


def test_a_group_that_an_operator_takes_has_its_name(tmp_path):
    import torch.distributed as dist

    from modelsummary.operators.collective_calls import collective_of
    from modelsummary.operators.operator_calls import OperatorLog
    from modelsummary.parallel.applied_rank import fake_world

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            log.note(func, args, kwargs or {}, out := func(*args, **(kwargs or {})))
            return out

    log = OperatorLog(id, set())
    with fake_world(0, 2):
        group = dist.new_group([0, 1])
        with Log():
            dist.all_reduce(torch.ones(3), group=group)
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(
                torch.ones(3, dtype=torch.int64), 2, dist.group.WORLD.group_name
            )
            torch.ops._c10d_functional.wait_tensor(gathered)
        names = group.group_name, dist.group.WORLD.group_name
    found = [call for run in log.runs if (call := collective_of(run.call)) is not None]
    assert found == [("all_reduce", names[0], torch.float32, 12), ("all_gather", names[1], torch.int64, 48)]
