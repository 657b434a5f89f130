"""``measure_latency`` runs models really, and leaves them as they were. No test looks at how long something takes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modelsummary import InputError, Statistics, StepError
from tests.models import Call
from tests.untouched import untouched

MODELS = {
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()),
    "lstm": lambda: Call(lambda self, x: self.lstm(x.flatten(2))[0], lstm=nn.LSTM(36, 5, 2)),
    "attention": lambda: Call(
        lambda self, x: self.layer(x.flatten(2)), layer=nn.TransformerEncoderLayer(36, 2, 8, batch_first=True)
    ),
    "called twice": lambda: Call(lambda self, x: self.a(self.a(x)), a=nn.Conv2d(3, 3, 3, padding=1)),
    "decides by values": lambda: Call(
        lambda self, x: self.a(x) if x.sum() > 0 else self.b(x), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1)
    ),
    "writes into its input": lambda: Call(lambda self, x: self.a(x.mul_(2)), a=nn.Conv2d(3, 3, 1)),
    "script": lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))),
    "checkpointed": lambda: Call(
        lambda self, x: checkpoint(self.a, x, use_reentrant=False), a=nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh())
    ),
    "outputs in a dict": lambda: Call(lambda self, x: {"a": [self.a(x)], "b": None}, a=nn.Conv2d(3, 3, 1)),
}


def check_sums(stats, prefix=""):
    rows = [stats.root, *stats]
    own = [getattr(row, f"{prefix}self_latency_ms") or 0.0 for row in rows]
    root = getattr(stats.root, f"{prefix}latency_ms")
    assert root > 0
    assert sum(own) == pytest.approx(root, rel=1e-3)
    assert all(each >= 0 for each in own)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_models_stay_as_they_were(name, mode):
    model = MODELS[name]().train(mode == "train")
    x = torch.rand(2, 3, 6, 6)
    before = x.clone()
    stats = Statistics(model, x)
    with untouched(model):
        assert stats.measure_latency(warmup=0, runs=2, backward=True) is stats
    assert torch.equal(x, before)
    check_sums(stats)
    check_sums(stats, "backward_")
    assert stats.latency_overhead.runs == 2
    assert stats.latency_overhead.device == "cpu"
    assert stats.latency_overhead.backward.ratio > 0


def test_fused_attention_is_not_opened():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    stats = Statistics(model, (1, 3, 8)).measure_latency(warmup=0, runs=1)
    assert stats["0"].latency_ms > 0
    assert stats["0.linear1"].latency_ms is None
    assert "fused" in stats["0.linear1"].note


def test_grad_and_buffers_survive():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(3, 2)).sum().backward()
    stats = Statistics(model, (3, 2))
    with untouched(model):
        stats.measure_latency(runs=1, backward=True)


def test_a_forward_that_raises():
    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            raise ValueError("enough")
        return self.a(x)

    model = Call(forward, a=nn.BatchNorm1d(2))
    model.calls = 0
    stats = Statistics(model, torch.randn(3, 2))
    with untouched(model), pytest.raises(StepError, match="enough"):
        stats.measure_latency()
    assert stats.root.latency_ms is None


def test_a_forward_that_takes_gradients():
    def forward(self, x):
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(self.a(x).sum(), x)[0]

    model = Call(forward, a=nn.Linear(2, 2))
    with untouched(model):
        check_sums(Statistics(model, (3, 2)).measure_latency(runs=1))


def test_another_input_of_the_same_sizes(capsys):
    model = Call(lambda self, x: print(x.is_meta or float(x[0, 0])) or self.a(x), a=nn.Linear(2, 2))
    stats = Statistics(model, (3, 2))
    capsys.readouterr()
    stats.measure_latency(torch.full((3, 2), 7.0), warmup=0, runs=1)
    assert set(capsys.readouterr().out.split()) == {"7.0"}
    with pytest.raises(InputError, match=r"sizes \[\[3, 2\]\] of these statistics, got \[\[4, 2\]\]"):
        stats.measure_latency(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": 0}, "runs an integer >= 1, got 3 and 0"),
        ({"warmup": -1}, "warmup must be an integer >= 0 .* got -1 and"),
        ({"runs": 1.5}, r"got 3 and 1\.5"),
        ({"device": "nowhere"}, "device must name a torch device, got 'nowhere'"),
        ({"device": "meta"}, "a tensor is on meta"),
    ],
)
def test_bad_arguments(arguments, message):
    model = nn.Linear(2, 2)
    stats = Statistics(model, (1, 2))
    with untouched(model), pytest.raises(InputError, match=message):
        stats.measure_latency(**arguments)


def test_what_cannot_be_measured():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="a tensor is on meta; use estimate_latency"):
        Statistics(model, (1, 2)).measure_latency()
    with pytest.raises(InputError, match="nothing in the output requires a gradient"):
        Statistics(nn.ReLU(), (1, 2)).measure_latency(backward=True)
    with pytest.raises(InputError, match="live model and an input"):
        Statistics(nn.ReLU()).measure_latency()


def test_latency_as_an_argument_and_in_the_table():
    stats = Statistics(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (1, 2), latency=True)
    assert stats.latency_overhead.runs == 10
    table = str(stats)
    assert "Latency (ms)" in table
    assert "Latency %" in table
    assert "Latency: median of 10 runs on cpu; a forward took" in table
    again = pickle.loads(pickle.dumps(stats))
    assert str(again) == table
    assert "Latency" not in str(Statistics(nn.Linear(2, 2), (1, 2)))


def test_achieved_rates():
    stats = Statistics(nn.Linear(4, 8), (2, 4))
    row = stats.root
    assert (row.achieved_flops_per_second, row.achieved_bytes_per_second) == (None, None)
    # 2 x 64 MACs; reads 8 + 32 + 8 floats and writes 16
    assert row.arithmetic_intensity == 128 / (4 * 64)
    row.latency_ms = 0.5
    assert row.achieved_flops_per_second == 128 / 0.5e-3
    assert row.achieved_bytes_per_second == 256 / 0.5e-3


def test_split_by_latency():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    stats = Statistics(model, (2, 4))
    with pytest.raises(InputError, match="nothing was measured or estimated"):
        stats.split(2, by="latency")
    stats.measure_latency(runs=1)
    for row, milliseconds in zip(stats, (5.0, 1.0, 1.0, 2.0), strict=True):
        row.latency_ms = row.self_latency_ms = milliseconds
    stats.root.latency_ms = 9.0
    stages = stats.split(2, by="latency")
    assert [each.calls for each in stages.facts] == [1, 3]
    assert [each.cost for each in stages.facts] == pytest.approx([5e-3, 4e-3])  # in seconds
    assert stages.by == "latency"


def test_compiled_models():
    pytest.importorskip("torch._dynamo")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    stats = Statistics(compiled, (3, 2)).measure_latency(runs=2)
    assert stats.root.latency_ms > 0
    assert stats["0"].latency_ms is None
    assert "compiled" in stats["0"].note


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's thread makes no context
def test_cuda():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    stats = Statistics(model, torch.randn(64, 512, device="cuda"))
    with untouched(model):
        stats.measure_latency(backward=True)
    check_sums(stats)
    check_sums(stats, "backward_")
    assert stats.latency_overhead.per_call_us == 0


@pytest.mark.gpu
def test_a_copy_runs_on_another_device():
    model = nn.Linear(512, 512)
    stats = Statistics(model, (64, 512))
    with untouched(model):
        stats.measure_latency(device="cuda")
    assert stats.latency_overhead.device == "cuda"


@pytest.mark.gpu
def test_nothing_waits_inside_of_the_forward():
    from torch.profiler import ProfilerActivity, profile

    from modelsummary.capture.clock import clock_for
    from modelsummary.capture.timer import Timer

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
    x = torch.randn(8, 64, device="cuda")
    model(x)
    torch.cuda.synchronize()
    timer = Timer(model, clock_for(torch.device("cuda")))
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with timer.running(), profile(activities=activities, acc_events=True) as traced, torch.no_grad():
        model(x)
    names = [event.name for event in traced.events()]
    assert not [name for name in names if "Synchronize" in name and "Device" not in name]
    assert timer.steps[0].settle().milliseconds > 0


def test_compiled_models_of_any_class():
    pytest.importorskip("torch._dynamo")
    compiled = torch.compile(Call(lambda self, x: self.a(x), a=nn.Linear(2, 2)), backend="eager")
    assert Statistics(compiled, (3, 2)).measure_latency(runs=1).root.latency_ms > 0


def test_optimizers_inside_of_the_backward():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizers = {each: torch.optim.SGD([each], 0.1, momentum=0.9) for each in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
    stats = Statistics(model, (3, 2))
    before = copy.deepcopy(model.state_dict())
    stats.measure_latency(runs=2, backward=True)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_large_buffers_written_by_turns():
    def forward(self, x):
        self.n += 1
        (self.one if self.n % 2 else self.two).add_(1)
        return self.a(x)

    model = Call(forward, a=nn.Linear(2, 2))
    model.n = 0
    model.register_buffer("one", torch.zeros(70_000))
    model.register_buffer("two", torch.zeros(70_000))
    with untouched(model):
        Statistics(model, (3, 2)).measure_latency(runs=2)


def test_measuring_again_forgets_the_backward():
    stats = Statistics(nn.Linear(2, 2), (3, 2)).measure_latency(runs=1, backward=True)
    assert stats.root.backward_latency_ms > 0
    assert stats.measure_latency(runs=1).root.backward_latency_ms is None


def test_another_dtype():
    with pytest.raises(InputError, match=r"dtypes \[torch\.float32\] of these statistics, got \[torch\.float64\]"):
        Statistics(nn.Linear(2, 2), torch.ones(3, 2)).measure_latency(torch.ones(3, 2).double())
    with pytest.raises(InputError, match="backward must be True or False, got 'yes'"):
        Statistics(nn.Linear(2, 2), (3, 2)).measure_latency(backward="yes")
