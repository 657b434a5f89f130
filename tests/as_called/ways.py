"""Ways in which people make and call models. Each is small, and says how the same call is run without the package."""

from __future__ import annotations

import copy
import tempfile
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from modelsummary import Statistics
from tests.idioms import Gpt2
from tests.zoo.example import Example

__all__ = ["WAYS", "Way"]


@dataclass
class Way:
    """A model, and its call.

    Attributes:
        model: what the user has.
        args, kwargs: arguments of ``Statistics`` after the model.
        example: the same model and call without the package, for independent figures; it can be copied.
        around: context in which the user calls the package.
        run: calls a function, as the user's program does: in a thread, say.
        unlike: independent figures that are of something else here, such as of a forward that runs twice.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    example: Example | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    run: Callable[[Callable[[], Any]], Any] = lambda function: function()
    unlike: frozenset[str] = frozenset()

    def statistics(self) -> Statistics:
        """Return the statistics, as the user asks for them."""
        return Statistics(self.model, *self.args, **self.kwargs)

    def independent(self) -> Example:
        """Return the call without the package."""
        return self.example or Example(self.model, self.args, self.kwargs)


WAYS: dict[str, Callable[[], Iterator[Way]]] = {}


def way(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a way: a function that returns it, or a generator that yields it and cleans up."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        def yields() -> Iterator[Way]:
            torch.manual_seed(0)
            made = make()
            if isinstance(made, Way):
                yield made
            else:
                yield from made

        assert title not in WAYS
        WAYS[title] = yields
        return make

    return add


class Mlp(nn.Module):
    """A perceptron with a norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.fc1, self.norm = nn.Linear(16, 32, **options), nn.LayerNorm(32, **options)
        self.fc2, self.fc3 = nn.Linear(32, 32, **options), nn.Linear(32, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(self.norm(F.gelu(self.fc1(x))))))


class Conv(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.bn(self.conv1(x)))))
        return self.head(self.drop(x.mean((2, 3))))


def x(**options: Any) -> Tensor:
    return torch.randn(4, 16, **options)


def simple(model: nn.Module, *args: Any, **kwargs: Any) -> Way:
    return Way(model, args, kwargs)


@way("tensor")
def _() -> Way:
    return simple(Mlp(), x())


@way("size")
def _() -> Way:
    model = Mlp()
    return Way(model, ((4, 16),), example=Example(model, (x(),)))


@way("keyword-only forward")
def _() -> Way:
    class KeywordOnly(Mlp):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x)

    return simple(KeywordOnly(), x=x())


@way("dict of keyword arguments")
def _() -> Way:
    model = Mlp()
    return Way(model, ({"x": (given := x())},), example=Example(model, (given,)))


@way("one dict")
def _() -> Way:
    class TakesDict(Mlp):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"logits": super().forward(batch["features"])}

    model, batch = TakesDict(), {"features": x()}
    return Way(model, ((batch,),), example=Example(model, (batch,)))


@dataclass
class Batch:
    features: Tensor
    scale: float = 2.0


@way("dataclass")
def _() -> Way:
    class TakesDataclass(Mlp):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward(batch.features) * batch.scale

    return simple(TakesDataclass(), Batch(x()))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@way("named tuple")
def _() -> Way:
    class TakesPair(Mlp):
        def forward(self, pair: Pair) -> Pair:
            return Pair(super().forward(pair.left), pair.right.sum())

    model, pair = TakesPair(), Pair(x(), x())
    return Way(model, ((pair,),), example=Example(model, (pair,)))


@way("list of tensors")
def _() -> Way:
    class TakesList(Mlp):
        def forward(self, parts: list[Tensor]) -> list[Tensor]:
            return [super(TakesList, self).forward(part) for part in parts]

    model, parts = TakesList(), [x(), x()]
    return Way(model, (parts,), example=Example(model, (parts,)))


@way("numpy")
def _() -> Way:
    model, given = Mlp(), x()
    return Way(model, (np.asarray(given),), example=Example(model, (given,)))


def tokens() -> dict[str, Tensor]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    return {"input_ids": torch.randint(50, (2, 12)), "attention_mask": mask}


class Encoded(UserDict[str, Any]):
    """A batch of a tokenizer: no dict, but a mapping with attributes."""


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True) -> Any:
        hidden = self.embed(input_ids)
        hidden = self.layer(hidden, src_key_padding_mask=None if attention_mask is None else attention_mask == 0)
        return {"logits": self.head(hidden), "past": hidden if use_cache else None}


@way("tokenizer's batch, **batch")
def _() -> Way:
    return simple(Encoder(), **Encoded(tokens()))


@way("tokenizer's batch, as it is")
def _() -> Way:
    model, batch = Encoder(), tokens()
    return Way(model, (Encoded(batch),), example=Example(model, (), batch))


@way("training mode, dropout")
def _() -> Way:
    return simple(Conv().train(), torch.randn(4, 3, 19, 23))


@way("batch of one, odd sizes")
def _() -> Way:
    return simple(Conv().eval(), torch.randn(1, 3, 33, 31))


@way("channels last")
def _() -> Way:
    model = Conv().eval().to(memory_format=torch.channels_last)
    return simple(model, torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last))


@way("no_grad around")
def _() -> Way:
    return Way(Mlp(), (x(),), around=torch.no_grad)


@way("inference_mode around")
def _() -> Way:
    return Way(Mlp(), (x(),), around=torch.inference_mode)


@way("autocast around")
def _() -> Way:
    return Way(Mlp(), (x(),), around=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))


@way("deterministic algorithms")
def _() -> Way:
    @contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return Way(Mlp(), (x(),), around=deterministic)


@way("in a thread")
def _() -> Iterator[Way]:
    with ThreadPoolExecutor(1) as pool:
        yield Way(Mlp(), (x(),), run=lambda function: pool.submit(function).result())


@way("frozen backbone")
def _() -> Way:
    model = Mlp()
    for module in (model.fc1, model.norm, model.fc2):
        module.requires_grad_(False)
    return simple(model, x())


@way("all frozen")
def _() -> Way:
    return simple(Mlp().requires_grad_(False), x())


@way("tied weights")
def _() -> Way:
    return simple(Gpt2(depth=2).eval(), torch.randint(50, (2, 12)))


@way("input that requires a gradient")
def _() -> Way:
    return simple(Mlp(), x(requires_grad=True))


@way("forward is a closure")
def _() -> Way:
    model = nn.Module()
    model.fc1, model.fc2 = nn.Linear(16, 32), nn.Linear(32, 8)
    model.forward = lambda x: model.fc2(model.fc1(x).relu())
    twin = nn.Sequential(copy.deepcopy(model.fc1), nn.ReLU(), copy.deepcopy(model.fc2))
    given = x()
    return Way(model, (given,), example=Example(twin, (given,)))


@way("raw parameters")
def _() -> Way:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(16, 32), torch.randn(32, 8)])

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.weights[0]) @ self.weights[1]

    return simple(Raw(), x())


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@way("torch.compile")
def _() -> Way:
    model, given = Mlp(), x()
    return Way(compiled(model), (given,), example=Example(model, (given,)))


@way("torch.compile, has run")
def _() -> Iterator[Way]:
    model, given = Mlp(), x()
    whole = compiled(model)
    whole(given)
    yield Way(whole, (given,), example=Example(Mlp(), (given,)))
    torch._dynamo.reset()


@way("model.compile()")
def _() -> Iterator[Way]:
    model, given = Mlp(), x()
    model.compile(backend="eager")
    model(given)
    yield Way(model, (given,), example=Example(Mlp(), (given,)))
    torch._dynamo.reset()


@way("scripted submodule")
def _() -> Way:
    class Scripted(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.fc2 = torch.jit.script(self.fc2)

    model, given = Scripted(), x()
    return Way(model, (given,), example=Example(Mlp(), (given,)))


@way("DataParallel")
def _() -> Way:
    model, given = Mlp(), x()
    return Way(nn.DataParallel(model), (given,), example=Example(model, (given,)))


@contextmanager
def group() -> Iterator[Any]:
    """Run the body with a process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield dist.device_mesh.init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


@way("DDP")
def _() -> Iterator[Way]:
    model, given = Mlp(), x()
    twin = copy.deepcopy(model)
    with group():
        yield Way(nn.parallel.DistributedDataParallel(model), (given,), example=Example(twin, (given,)))


def fsdp1(*, has_run: bool) -> Iterator[Way]:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, given = Mlp(), x()
    twin = copy.deepcopy(model)
    with group():
        whole = Fsdp(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"))
        if has_run:
            whole(given).sum().backward()
            whole.zero_grad()
        yield Way(whole, (given,), example=Example(twin, (given,)))


@way("FSDP1")
def _() -> Iterator[Way]:
    return fsdp1(has_run=False)


@way("FSDP1, has run")
def _() -> Iterator[Way]:
    return fsdp1(has_run=True)


@way("FSDP2")
def _() -> Iterator[Way]:
    from torch.distributed.fsdp import fully_shard

    model, given = Mlp(), x()
    twin = copy.deepcopy(model)
    with group() as mesh:
        for module in (model.fc2, model):
            fully_shard(module, mesh=mesh)
        yield Way(model, (given,), example=Example(twin, (given,)), unlike=frozenset({"step"}))


@way("tensor parallel")
def _() -> Iterator[Way]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, given = Mlp(), x()
    twin = copy.deepcopy(model)
    with group() as mesh:
        parallelize_module(model, mesh, {"fc2": ColwiseParallel(), "fc3": RowwiseParallel()})
        yield Way(model, (given,), example=Example(twin, (given,)))


@way("on meta")
def _() -> Way:
    return Way(Mlp(device="meta"), (x(device="meta"),), example=Example(Mlp(), (x(),)))


@way("on meta, size")
def _() -> Way:
    return Way(Mlp(device="meta"), ((4, 16),), example=Example(Mlp(), (x(),)))


@way("bfloat16")
def _() -> Way:
    return simple(Mlp(dtype=torch.bfloat16), x(dtype=torch.bfloat16))


@way("float16")
def _() -> Way:
    return simple(Mlp(dtype=torch.float16), x(dtype=torch.float16))


@way("float64")
def _() -> Way:
    return simple(Mlp(dtype=torch.float64), x(dtype=torch.float64))


@way("dynamic int8")
def _() -> Way:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no engine for quantised layers")
    model = torch.ao.quantization.quantize_dynamic(Mlp().eval(), {nn.Linear}, torch.qint8)
    return simple(model, x())


@way("torchao int8 weights")
def _() -> Way:
    quantization = pytest.importorskip("torchao.quantization")
    model = Mlp().eval().requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return simple(model, x())


@way("hooks")
def _() -> Way:
    def hooked(model: nn.Module) -> nn.Module:
        seen: list[Any] = []
        model.fc1.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))
        model.fc2.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        model.fc3.register_full_backward_hook(lambda module, into, out: None)
        return model

    given = x()
    return Way(hooked(Mlp()), (given,), example=Example(hooked(Mlp()), (given,)))


@way("weight_norm")
def _() -> Way:
    model = Mlp()
    parametrizations.weight_norm(model.fc2)
    return simple(model, x())


@way("spectral_norm")
def _() -> Way:
    model = Mlp().eval()
    parametrizations.spectral_norm(model.fc2)
    return simple(model, x())


@way("lazy")
def _() -> Way:
    model, given = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(8)), x()
    twin = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    return Way(model, (given,), example=Example(twin, (given,)))


@way("number of outputs varies")
def _() -> Way:
    class Varies(Mlp):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return (out, out.mean()) if self.training else out

    return simple(Varies(), x())


@way("result is None and numbers")
def _() -> Way:
    class Mixed(Mlp):
        def forward(self, x: Tensor) -> Any:
            return {"out": super().forward(x), "extra": None, "count": len(x), "name": "mlp"}

    return simple(Mixed(), x())


@way("just trained")
def _() -> Way:
    model, given = Mlp(), x()
    optimizer = torch.optim.AdamW(model.parameters())
    model(given).sum().backward()
    optimizer.step()
    model.optimizer = [optimizer]
    twin = Mlp()
    return Way(model, (given,), example=Example(twin, (given,)))


@way("load_state_dict(assign=True)")
def _() -> Way:
    model = Mlp(device="meta")
    model.load_state_dict(Mlp().state_dict(), assign=True)
    return simple(model, x())


@way("checkpointed blocks")
def _() -> Way:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc3(checkpoint(self.fc2, F.gelu(self.fc1(x)), use_reentrant=False))

    return simple(Checkpointed(), x())


@way("values decide")
def _() -> Way:
    class Decides(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * 2 if out.abs().sum().item() > -1 else out

    return simple(Decides(), x())


def llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers", exc_type=(ImportError, RuntimeError))
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def ids() -> Tensor:
    return torch.randint(64, (2, 12))


@way("Hugging Face, all defaults")
def _() -> Way:
    return simple(llama(), ids())


@way("Hugging Face, mask and labels")
def _() -> Way:
    given = ids()
    return simple(llama(), input_ids=given, attention_mask=torch.ones_like(given), labels=given)


@way("Hugging Face, checkpointing")
def _() -> Way:
    model = llama().train()
    model.gradient_checkpointing_enable()
    # The model's FLOPs leave out recomputation, which torch's counter includes.
    return Way(model, (), {"input_ids": ids(), "use_cache": False}, unlike=frozenset({"training"}))


@way("LoRA by peft")
def _() -> Way:
    peft = pytest.importorskip("peft", exc_type=(ImportError, RuntimeError))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    # A fused attention computes the gradient of the first keys, which nothing needs; the counted one, of products, not.
    return Way(model, (), {"input_ids": ids(), "use_cache": False}, unlike=frozenset({"training"}))
