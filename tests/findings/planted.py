"""Models with one planted defect each, and the finding that names it: three or more for each rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Planted(NamedTuple):
    """A defect.

    Attributes:
        code: code of the rule that finds it.
        fqn: module that the finding names.
        make: returns the model.
        inputs: what its forward takes.
        words: text that the finding says.
    """

    code: str
    fqn: str | None
    make: Callable[[], nn.Module]
    inputs: Any
    words: str = ""


class Block(nn.Module):
    """A residual block that calls ``change(block, x)`` between its layers."""

    def __init__(self, change: Callable[..., Any] = lambda _, x: x, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.change = change

    def forward(self, x):
        hidden = self.up(self.norm(x))
        return x + self.down(self.change(self, F.gelu(hidden)))


class Images(nn.Module):
    """A small convolutional network that calls ``change(model, x)`` between its layers."""

    def __init__(self, change: Callable[..., Any] = lambda _, x: x) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.head = nn.Conv2d(16, 32, 3, stride=2), nn.Linear(32, 10)
        self.change = change

    def forward(self, x):
        x = self.change(self, F.relu(self.norm1(self.conv1(x))))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


class Recurrent(nn.Module):
    """A recurrent classifier of tokens that calls ``change(model, x)`` between its layers."""

    def __init__(self, change: Callable[..., Any] = lambda _, x: x) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(100, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 5)
        self.change = change

    def forward(self, tokens):
        return self.head(self.change(self, self.rnn(self.table(tokens))[0]))


TEXT, IMAGES = (4, 16, 64), (4, 3, 32, 32)
TOKENS = torch.zeros(2, 12, dtype=torch.long)
KINDS: dict[str, tuple[type[nn.Module], Any, int]] = {
    "block": (Block, TEXT, 128),
    "images": (Images, IMAGES, 16),
    "recurrent": (Recurrent, TOKENS, 64),
}


def sound() -> list[tuple[nn.Module, Any]]:
    """Return models without a defect, and their inputs."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    frozen = nn.Sequential(Block(), Block())
    frozen[0].requires_grad_(False)
    tied = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100, bias=False))
    tied[1].weight = tied[0].weight
    return [
        (nn.Sequential(Block(), Block()), TEXT),
        (Images(), IMAGES),
        (Recurrent(), TOKENS),
        (layer, TEXT),
        (frozen, TEXT),
        (tied, TOKENS),
        (nn.Sequential(Block(), Block()).to(torch.bfloat16), TEXT),
        (Images().eval(), IMAGES),
    ]


def _in_each(change: Callable[..., Any], prepare: Callable[..., Any] = lambda model: None) -> list[Any]:
    """Return functions that make each kind of model with a change, and the inputs."""

    def maker(kind: type[nn.Module]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            model = kind(change)
            prepare(model)
            return model

        return make

    return [(maker(kind), inputs, width) for kind, inputs, width in KINDS.values()]


def _parameter_unused(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.ones(3))


def _module_unused(model: nn.Module) -> None:
    model.spare = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _buffer_unused(model: nn.Module) -> None:
    model.register_buffer("mask", torch.ones(8, 8))


def _hook(model: nn.Module) -> None:
    def look(*_: Any) -> None:
        pass

    model.head.register_forward_hook(look) if hasattr(model, "head") else model.up.register_forward_hook(look)


def _with_layer(apply: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[Any]:
    """Return makers of models with a layer ``extra`` on the last or first dimension, which ``apply`` uses."""
    makers = []
    for kind, inputs, width in KINDS.values():

        def make(kind: type[nn.Module] = kind, width: int = width) -> nn.Module:
            model = kind(
                lambda model, x: apply(model, x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else apply(model, x)
            )
            model.extra = nn.Linear(width, width)
            return model

        makers.append((make, inputs, width))
    return makers


def _no_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        extra = model.extra(x)
    return x + extra


def _index(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * model.extra(x).argmax(-1, keepdim=True)


def _dropped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.extra(x)
    return x


def _overwritten(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    y = x * gate
    gate.add_(1)
    return y + gate


def _dropout_lost(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    F.dropout(x, 0.5)
    return x


def _exp_lost(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    norms = torch.exp(x).sum(-1)  # noqa: F841
    return x


def _twice(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * x + torch.sigmoid(x)


def _layer_twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.extra(x) + model.extra(x).tanh()


def _cloned(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.clone() * 2


def _to_double(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.double().exp().to(x.dtype)


def _there_and_back(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.half().float() + 1


def _float_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), model.extra.weight.float(), model.extra.bias.float()).to(x.dtype)


def _cast_weight(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.bfloat16(), model.extra.weight.bfloat16()).float()


def _transposed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ model.extra.weight.t().contiguous()


def _attention(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x.flatten(1, 2) if x.dim() == 4 else x
    y = y.expand(-1, 64, -1) if y.shape[1] == 1 else y
    scores = (y @ y.transpose(1, 2)) * y.shape[-1] ** -0.5
    return x + (scores.softmax(-1) @ y).view_as(x)


class Attention(nn.Module):
    """Self-attention by torch's function."""

    def __init__(self, heads: int, size: int, dtype: torch.dtype | None = None, groups: int = 1) -> None:
        super().__init__()
        self.heads, self.size, self.dtype, self.groups = heads, size, dtype, groups
        self.q = nn.Linear(64, heads * size)
        self.kv = nn.Linear(64, 2 * heads // groups * size)
        self.out = nn.Linear(heads * size, 64)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.heads // self.groups, self.size)).permute(2, 0, 3, 1, 4)
        if self.dtype is not None:
            q, k, v = (tensor.to(self.dtype) for tensor in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.groups > 1)
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))


class Scores(nn.Module):
    """Attention that is written out, with a mask and a dropout."""

    def __init__(self, masked: bool, dropout: float) -> None:
        super().__init__()
        self.qkv, self.masked, self.dropout = nn.Linear(64, 192), masked, nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / 4
        if self.masked:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        return (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)


def _frozen_norm(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.requires_grad_(False)
    return model


def _frozen_first(model: nn.Sequential) -> nn.Module:
    model[1].requires_grad_(False)
    return model


class InputGradient(nn.Module):
    """A module that turns gradients of its input on."""

    def forward(self, x):
        return x.clone().requires_grad_() + 0


def _constant(model: nn.Module, name: str, value: float) -> nn.Module:
    nn.init.constant_(model.get_parameter(name), value)
    return model


def _scaled(model: nn.Module, name: str, factor: float) -> nn.Module:
    with torch.no_grad():
        model.get_parameter(name).mul_(factor)
    return model


def _low_rank(*zeros: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False))
    for index in zeros:
        nn.init.zeros_(model[index].weight)
    return model


def _zero_convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    for index in (2, 4):
        nn.init.zeros_(model[index].weight)
        nn.init.zeros_(model[index].bias)
    return model


def _sharing(first: str, second: str, model: nn.Module) -> nn.Module:
    model.get_parameter(second).data = model.get_parameter(first).data
    return model


def _wide(vocabulary: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, vocabulary)).to(torch.bfloat16)


class Uncounted(nn.Module):
    """A model with a product that has no formula."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(64, 16), function

    def forward(self, x):
        return self.function(self.fc(x))


class Deciding(nn.Module):
    """A model that decides by values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y * 2 if y.float().abs().sum() > 1 else y


def _planted(code: str, fqn: str | None, cases: list[Any], words: str) -> list[Planted]:
    return [Planted(code, fqn, make, inputs, words) for make, inputs, *_ in cases]


def _changed(change: Callable[..., Any]) -> list[Any]:
    return _in_each(change)


def _prepared(prepare: Callable[..., Any]) -> list[Any]:
    return _in_each(lambda _, x: x, prepare)


def _gradients() -> list[Planted]:
    convolutions = lambda: nn.Sequential(InputGradient(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))  # noqa: E731
    frozen = [
        (lambda: _frozen_first(nn.Sequential(InputGradient(), Block(), Block())), TEXT),
        (lambda: _frozen_first(convolutions()), IMAGES),
        (lambda: _frozen_first(nn.Sequential(InputGradient(), Attention(4, 16), nn.Linear(64, 8))), TEXT),
    ]
    detached = _with_layer(lambda model, x: x + model.extra(x).detach())
    return [
        *_planted("G100", "", _changed(_overwritten), "modified by an inplace operation"),
        *_planted("G101", "", _prepared(_parameter_unused), "scale: trained, but never used"),
        *_planted("G102", "extra", _with_layer(_no_grad), "weight, bias: trained, but used under no_grad"),
        *_planted("G103", "extra", detached, "weight, bias: trained, but detached"),
        *_planted("G104", "extra", _with_layer(_dropped), "not in the loss"),
        *_planted("G105", "extra", _with_layer(_index), "without a gradient"),
        *_planted("G106", None, frozen, "keeps activations"),
    ]


def _work() -> list[Planted]:
    return [
        *_planted("U201", "spare", _prepared(_module_unused), "never runs; no gradient for 0.weight, 0.bias"),
        *_planted("U202", "", _prepared(_buffer_unused), "buffer mask is never read"),
        *_planted("U203", "", _changed(_exp_lost), "exp"),
        *_planted("U203", "", _changed(_dropout_lost), "dropout"),
        *_planted("U203", "extra", _with_layer(_dropped), "mm"),
        *_planted("R301", "", _changed(_twice), "sigmoid"),
        *_planted("R301", "extra", _with_layer(_layer_twice), "mm"),
        *_planted("R302", "", _changed(_cloned), "neither is written later"),
        *_planted("R302", "", _with_layer(_transposed), "transposed matrix"),
    ]


def _dtypes() -> list[Planted]:
    halves = [(lambda make=make: make().to(torch.bfloat16), inputs) for make, inputs, _ in _with_layer(_float_layer)]
    return [
        *_planted("D401", "", _changed(_to_double), "float64"),
        *_planted("D402", "", halves, "float32 in a bfloat16 run"),
        *_planted("D403", "", _changed(_there_and_back), "float16 and back"),
        *_planted("D404", "", _with_layer(_cast_weight), "from float32 to bfloat16"),
    ]


def _shapes() -> list[Planted]:
    wide = [(sizes, fqn) for sizes, fqn in (((50257, 64), "2"), ((64, 1001), None), ((1001, 64), "2"))]
    heads = [(4, 20), (2, 36), (8, 12)]
    written_out = [(False, 0.0), (True, 0.0), (False, 0.1)]
    fallbacks = [
        (lambda: Attention(4, 18), "heads of 18"),
        (lambda: Attention(4, 16, torch.float64), "float64"),
        (lambda: Attention(4, 16, groups=2), "these arguments"),
    ]
    long = (4, 128, 64)
    return [
        *(Planted("S501", fqn, lambda sizes=sizes: _wide(*sizes), (4, 64), "multiple of 8") for sizes, fqn in wide),
        *(
            Planted("S502", "", lambda sizes=sizes: Attention(*sizes).bfloat16(), TEXT, f"heads of {sizes[1]}")
            for sizes in heads
        ),
        *(Planted("S503", "", lambda options=options: Scores(*options), long, "in parts") for options in written_out),
        Planted("S503", "", lambda: Scores(True, 0.1).to(torch.bfloat16), long, "in parts"),
        *(Planted("S503", "", make, long, words) for make, words in fallbacks),
    ]


def _norms() -> list[Planted]:
    biased = [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), IMAGES),
        (lambda: nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)), (64, 64)),
        (lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), IMAGES),
        (lambda: nn.Sequential(nn.Conv1d(16, 8, 3), nn.InstanceNorm1d(8)), TEXT),
    ]
    few = [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)), (1, 3, 32, 32)),
        (lambda: nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32)), (4, 64)),
        (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Conv2d(3, 8, 1)), (2, 3, 32, 32)),
    ]
    frozen = [
        (lambda: _frozen_norm(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))), IMAGES),
        (lambda: _frozen_norm(nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))), (64, 64)),
    ]
    return [
        *_planted("N601", "0", biased, "bias"),
        *_planted("N602", "1", few, "training mode"),
        *_planted("N603", "1", frozen, "statistics change"),
        Planted("N603", "norm1", lambda: _frozen_norm(Images()), IMAGES, "statistics change"),
    ]


def _values() -> list[Planted]:
    def zeros(*names: str) -> nn.Module:
        model = Block()
        for name in names:
            _constant(model, name, 0.0)
        return model

    return [
        Planted("P701", "up", lambda: _constant(Block(), "up.weight", 0.1), TEXT, "outputs stay equal"),
        Planted("P701", "conv2", lambda: _constant(Images(), "conv2.weight", 1.0), IMAGES, "outputs stay equal"),
        Planted("P701", "head", lambda: _constant(Recurrent(), "head.weight", -0.5), TOKENS, "outputs stay equal"),
        Planted("P702", "2", lambda: _low_rank(1, 2), (4, 64), "neither gets a gradient"),
        Planted("P702", "4", _zero_convolutions, IMAGES, "neither gets a gradient"),
        Planted("P702", "down", lambda: zeros("up.weight", "up.bias", "down.weight"), TEXT, "neither gets a gradient"),
        Planted("P703", "up", lambda: _scaled(Block(), "up.weight", 100), TEXT, "grow by about 5"),
        Planted("P703", "conv2", lambda: _scaled(Images(), "conv2.weight", 100), IMAGES, "grow"),
        Planted("P703", "head", lambda: _scaled(Recurrent(), "head.weight", 100), TOKENS, "grow"),
        Planted(
            "P703", "down", lambda: _scaled(_scaled(Block(), "up.weight", 1e-3), "down.weight", 1e-3), TEXT, "shrink"
        ),
    ]


def _hazards() -> list[Planted]:
    def tied() -> nn.Module:
        return _sharing("0.weight", "1.weight", nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100)))

    def blocks() -> nn.Module:
        return _sharing("0.up.weight", "1.up.weight", nn.Sequential(Block(), Block()))

    def convolutions() -> nn.Module:
        return _sharing("0.weight", "2.weight", nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1)))

    hooked = zip(_prepared(_hook), ("up", "head", "head"), strict=True)
    deciding = [(Block, TEXT), (Images, IMAGES), (Recurrent, TOKENS)]
    functions = {
        "linalg_qr": lambda x: torch.linalg.qr(x)[0],
        "linalg_matrix_exp": lambda x: torch.matrix_exp(x[..., :16, :16]),
        "linalg_inv_ex": lambda x: torch.linalg.inv(x[..., :16, :16]),
    }
    return [
        Planted("T801", "1", tied, TOKENS, "weight has the memory of 0.weight"),
        Planted("T801", "1.up", blocks, TEXT, "weight has the memory of 0.up.weight"),
        Planted("T801", "2", convolutions, IMAGES, "weight has the memory of 0.weight"),
        *(Planted("T802", fqn, make, inputs, "forward hook") for (make, inputs, _), fqn in hooked),
        *(
            Planted("C902", "", lambda kind=kind: Deciding(kind()), inputs, "runs for real: aten")
            for kind, inputs in deciding
        ),
        *(Planted("C901", "", lambda f=f: Uncounted(f), TEXT, name) for name, f in functions.items()),
    ]


# ------------------------------------------------------------------------------------------------- on request


class Branching(nn.Module):
    """A branch on a value."""

    def forward(self, x):
        if x.sum() > 0:
            return x
        return x + 1


class Reading(nn.Module):
    """A value that becomes a number of Python."""

    def forward(self, x):
        return x * len({*x.flatten()[:2].tolist()})


class Filtering(nn.Module):
    """A size that depends on values."""

    def forward(self, x):
        positive = x[x > 0]
        return positive.mean() * x if len(positive) > 3 else x


class Counting(nn.Module):
    """An integer that each call changes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Growing(nn.Module):
    """A list that each call lengthens."""

    def __init__(self):
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x):
        self.seen.append(1)
        return x + len(self.seen)


class Named(nn.Module):
    """A text that each call changes."""

    def __init__(self):
        super().__init__()
        self.name = ""

    def forward(self, x):
        self.name += "x"
        return x * 2 if self.name.endswith("x") and len(self.name) < 1000 else x


class Repeated(nn.Module):
    """Blocks that ``call(model, block, x)`` runs."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.stem, self.blocks, self.call = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(3)), call

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(self, block, x)
        return x


class Overwriting(Block):
    """A block that writes into what it takes."""

    def forward(self, x):
        x += self.down(F.gelu(self.up(self.norm(x))))
        return x


class Viewing(Block):
    """A block that returns a view."""

    def forward(self, x):
        return super().forward(x).flatten(1).unflatten(1, x.shape[1:])


def _of_blocks(kind: type[Block], call: Callable[..., Any] = lambda _, block, x: block(x)) -> nn.Module:
    model = Repeated(call)
    model.blocks = nn.ModuleList(kind() for _ in range(3))
    return model


def _on_request() -> list[Planted]:
    def behind(kind: type[nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(64, 64), kind())

    def reading(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach().numpy().mean()

    def writes(_: Any, block: Block, x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        y += 1
        return y

    def reads(_: Any, block: Block, x: torch.Tensor) -> torch.Tensor:
        return block(x) * block.up.weight.mean()

    breaks = {Branching: "branches on the value", Reading: "breaks the graph", Filtering: "breaks the graph"}
    changing = {Counting: "calls changes", Growing: "compiled again", Named: "compiled again"}
    whole = {
        "norm": lambda _, x: F.layer_norm(x, x.shape[-1:]),
        "softmax": lambda _, x: x.softmax(-1),
        "roll": lambda _, x: x.roll(1, -1),
    }
    return [
        *(Planted("B951", "1", behind(kind), TEXT, words) for kind, words in breaks.items()),
        *(Planted("B952", "1", behind(kind), TEXT, words) for kind, words in changing.items()),
        *(Planted("B953", "1", behind(kind), TEXT, "torch.export raises") for kind in breaks),
        *_planted("B954", "", _in_each(reading), "decides by values"),
        Planted("B955", None, lambda: _of_blocks(Overwriting), TEXT, "writes into what it takes"),
        Planted("B955", None, lambda: _of_blocks(Viewing, writes), TEXT, "it returns a view"),
        Planted("B955", None, lambda: Repeated(reads), TEXT, "reads blocks.0.up.weight"),
        *(
            Planted("B956", None, lambda change=change: nn.Sequential(Block(change), Block()), TEXT, "is not divided")
            for change in whole.values()
        ),
    ]


PLANTED = [*_on_request(), *_gradients(), *_work(), *_dtypes(), *_shapes(), *_norms(), *_values(), *_hazards()]
