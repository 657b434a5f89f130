"""Formulas against hand-derived polynomials, and against fresh runs at sizes that made no formula."""

from __future__ import annotations

import pickle
import zipfile

import pytest
import sympy
import torch
from torch import nn

from modelsummary import FormulaError, InputError, LayerNotFoundError, NotLiveError, Statistics
from modelsummary.formulas import FIGURES
from tests.idioms import Gpt2
from tests.untouched import untouched

B, S, H, W = map(sympy.Symbol, ("batch", "sequence", "height", "width"))


@pytest.fixture(scope="module")
def gpt():
    return Statistics(Gpt2(vocab=50, width=16, heads=2, depth=2, length=64).eval(), torch.zeros(2, 8).long())


@pytest.fixture(scope="module")
def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1)
    )
    return Statistics(nn.Sequential(model, nn.Flatten(), nn.Linear(8, 10)), (1, 3, 32, 32))


def test_textbook_formula_of_a_gpt(gpt):
    layers, width, vocabulary = 2, 16, 50
    # 12 l h^2 per token in the blocks, 2 l s h in the attention, h V in the head
    expected = B * S * (12 * layers * width**2 + width * vocabulary) + 2 * layers * width * B * S**2
    assert sympy.expand(gpt.formula("macs") - expected) == 0
    assert gpt.formula("flops") == 2 * gpt.formula("macs")
    assert gpt.formula("macs", "h.0.mlp") == gpt.formula("macs", "h.1.mlp")
    assert gpt.formula("params") == gpt.total_params


def test_rounded_sizes(convolutions):
    first_h, first_w = sympy.floor(H / 2 + sympy.Rational(1, 2)), sympy.floor(W / 2 + sympy.Rational(1, 2))
    assert convolutions.formula("macs", "0.0") == 4 * 27 * B * first_h * first_w
    assert convolutions.formula("output_bytes") == 40 * B
    formula = convolutions.formula("macs")
    for batch, height, width in [(1, 7, 9), (5, 32, 33), (3, 101, 64)]:
        fresh = Statistics(convolutions.live.model, (batch, 3, height, width))
        assert formula.subs({"batch": batch, "height": height, "width": width}) == fresh.total_macs
        figures = convolutions.at(batch=batch, height=height, width=width)
        for figure in ("bytes_read", "total_output_bytes"):
            convolutions.formula(figure)  # from now on, figures are evaluated
        assert figures.macs == figures["macs"] == fresh.total_macs
        assert figures.bytes_read == fresh.root.bytes_read
        assert figures.total_output_bytes == fresh.total_output_bytes


def test_activation_bytes():
    stats = Statistics(Gpt2(vocab=50, width=16, heads=2, depth=1, length=64), torch.zeros(2, 8).long())
    names = {"ids": {1: "sequence"}}
    with untouched(stats.live.model):
        kept = stats.at(dimensions=names, sequence=21).activation_bytes
        formula = stats.formula("activation_bytes", dimensions=names)
    fresh = Statistics(stats.live.model, torch.zeros(2, 21).long())
    fresh.memory()
    assert kept == formula.subs({"sequence": 21}) == fresh.root.activation_bytes


@pytest.mark.slow
def test_activation_bytes_of_two_dimensions(gpt):
    fresh = Statistics(gpt.live.model, torch.zeros(3, 21).long())
    fresh.memory()
    sizes = {"batch": 3, "sequence": 21}
    assert gpt.formula("activation_bytes").subs(sizes) == fresh.root.activation_bytes


def test_all_figures():
    figures = Statistics(nn.Linear(4, 2), (3, 4)).at(batch=5)
    assert (figures.macs, figures.params, figures.input_bytes, figures.output_bytes) == (40, 10, 80, 40)
    assert set(figures.to_dict()) == {"sizes", "layer", "beyond", *FIGURES}
    assert "activation_bytes" in str(figures)


class Window(nn.Module):
    """Scores of each position with at most 16 others."""

    def forward(self, x):
        return x @ x[:, :16].transpose(1, 2)


def test_windows_are_pieces():
    stats = Statistics(Window(), (2, 4, 8))
    formula = stats.formula("macs")
    for length, keys in [(3, 3), (15, 15), (16, 16), (17, 16), (1000, 16)]:
        assert formula.subs({"batch": 5, "sequence": length, "length": 8}) == 5 * length * keys * 8
    assert stats._scaling(None).by_formula("macs", {"batch": 1, "sequence": 40, "length": 8}) == 40 * 16 * 8


class ScoresOfLong(nn.Module):
    """Nothing for short inputs."""

    def forward(self, x):
        return x @ x.transpose(1, 2) if x.shape[1] > 16 else x


def test_one_piece_may_be_constant():
    formula = Statistics(ScoresOfLong(), (2, 4, 8)).formula("macs", dimensions={"x": {0: "batch", 1: "sequence"}})
    for batch, length, expected in [(5, 16, 0), (1, 17, 17 * 17 * 8), (5, 40, 5 * 40 * 40 * 8)]:
        assert formula.subs({"batch": batch, "sequence": length}) == expected


class ScoresOfVeryLong(nn.Module):
    """Another product for inputs that are longer than nobody records."""

    def __init__(self, longest):
        super().__init__()
        self.longest = longest

    def forward(self, x):
        return x @ x.transpose(1, 2) if x.shape[1] > self.longest else x @ x[:, :1].transpose(1, 2)


def test_a_threshold_that_is_far_from_the_recorded_size():
    """Recorded at 16, the largest run has 4,901 positions."""
    names, longest = {"x": {0: "batch", 1: "sequence"}}, 3500
    stats = Statistics(ScoresOfVeryLong(longest), (2, 16, 8))
    formula = stats.formula("macs", dimensions=names)
    for length, keys in [(16, 1), (longest, 1), (longest + 1, longest + 1), (4000, 4000)]:
        assert formula.subs({"batch": 3, "sequence": length}) == 3 * length * keys * 8
    assert stats.at(batch=3, sequence=4000, dimensions=names).beyond("macs") == {}


def test_one_run_is_quicker_than_a_formula():
    """At 4,901 positions, the product of long inputs is run; 6,000 are too many for a run, see below."""
    stats = Statistics(ScoresOfVeryLong(3500), (2, 16, 8))
    figures = stats.at(sequence=4901)
    runs = stats._scaling(None).runs
    assert (figures.macs, figures.beyond("macs"), stats._scaling(None).runs - runs) == (2 * 4901**2 * 8, {}, 1)
    assert (figures.flops, figures.total_output_bytes, stats._scaling(None).runs - runs) == (
        4 * 4901**2 * 8,
        4 * 2 * 4901**2,
        1,
    )


def test_beyond_the_largest_size_that_was_run():
    figures = Statistics(ScoresOfVeryLong(5000), (2, 16, 8)).at(sequence=6000)
    assert figures.macs == 2 * 6000 * 8  # the product of long inputs was never run
    (largest,) = figures.beyond("macs").values()
    assert 4096 < largest < 6000
    assert f"\nsequence=6000 is beyond {largest}, the largest that was run: figures are extrapolated" in str(figures)
    assert figures.to_dict()["beyond"]["macs"] == {"sequence": largest}
    assert "params" not in figures.to_dict()["beyond"]
    assert figures.beyond("params") == {}


class Mask(nn.Module):
    def forward(self, x, mask):
        return (x @ x.transpose(1, 2)).masked_fill(mask, 0) @ x


def test_masks_of_values_stay_small():
    """A mask of 512 x 512 is not made 320 times as large in each of its dimensions: 27 GB."""
    stats = Statistics(Mask(), (torch.zeros(1, 512, 4), torch.zeros(512, 512, dtype=torch.bool)))
    names = {"x": {1: "sequence"}, "mask": {0: "sequence", 1: "sequence"}}
    figures = stats.at(sequence=16384, dimensions=names)
    assert figures.macs == 2 * 16384**2 * 4
    assert 4 * 512 < figures.beyond("macs")["sequence"] <= 8192  # 2**26 elements


class OtherCodeForOneOfOne(nn.Module):
    def forward(self, x):
        rows = 5 if x.shape == (1, 1) else x.numel()
        return torch.zeros(rows, 3, device=x.device) @ torch.zeros(3, 2, device=x.device)


def test_corners_are_checked():
    stats = Statistics(OtherCodeForOneOfOne(), (3, 8))
    scaling = stats._scaling(None)
    assert scaling.by_formula("macs", {"batch": 1, "length": 2}) == 2 * 6
    with pytest.raises(InputError, match="length must be >= 2, got 1"):
        scaling.by_formula("macs", {"batch": 1, "length": 1})
    assert stats.at(batch=1, length=1).macs == 5 * 6  # by a run


class OtherCodeForOne(nn.Module):
    def forward(self, x):
        rows = max(len(x), 5) if x.shape[1] == 1 else x.numel()
        return torch.zeros(rows, 3, device=x.device) @ torch.zeros(3, 2, device=x.device)


def test_each_piece_is_checked():
    """At length 1, no polynomial of the batch holds, although the fewest runs that determine one do not show it."""
    stats = Statistics(OtherCodeForOne(), (2, 8))
    scaling = stats._scaling(None)
    assert scaling.by_formula("macs", {"batch": 7, "length": 9}) == 7 * 9 * 6
    with pytest.raises(InputError, match="length must be >= 2, got 1"):
        scaling.by_formula("macs", {"batch": 7, "length": 1})
    assert stats.at(batch=7, length=1).macs == 7 * 6  # by a run
    assert str(stats.formula("macs")) == "6*batch*length"  # without the piece at length 1


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids, mask, memory_ids):
        own, other = self.embed(ids) * mask[..., None], self.embed(memory_ids)
        return own @ other.transpose(1, 2)


def test_inputs_share_dimensions():
    ids = torch.zeros(2, 6).long()
    stats = Statistics(TwoInputs(), (ids, torch.ones(2, 6).long(), torch.zeros(2, 5).long()))
    memory = sympy.Symbol("memory_sequence")
    assert stats.formula("macs") == 4 * B * S * memory
    names = {"ids": {0: "n", 1: "s"}, "mask": {0: "n", 1: "s"}, "memory_ids": {0: "n"}}
    assert str(stats.formula("macs", dimensions=names)) == "20*n*s"
    assert stats.at(dimensions=names, n=1, s=3).macs == 60


class OnlyMultiples(nn.Module):
    def forward(self, x):
        if x.shape[2] % 8:
            raise ValueError("the height must be a multiple of 8")
        return x.flatten(2) @ x.flatten(2).transpose(1, 2)


def test_steps_of_sizes():
    stats = Statistics(OnlyMultiples(), (1, 3, 16, 4))
    assert stats.formula("macs") == 9 * B * H * W
    assert stats.at(height=24, width=3).macs == 9 * 24 * 3
    with pytest.raises(InputError, match="height=20: the model accepts 16 and sizes a multiple of 8 away"):
        stats.at(height=20)


class Positions(nn.Embedding):
    """A table of 16 positions."""

    def forward(self, ids):
        return super().forward(ids) @ (self.weight[: ids.shape[1]] + torch.zeros(ids.shape[1], 1)).T


def test_the_recorded_size_is_the_largest():
    stats = Statistics(Positions(16, 4), torch.zeros(2, 16, dtype=torch.long))
    assert str(stats.formula("macs")) == "4*batch*sequence**2"


def test_a_size_that_a_stride_rounds_off_is_not_another_size():
    # 8 x 8 and 9 x 9 become 4 x 4 in 2 channels, 10 x 10 fits no more
    model = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Flatten(), nn.Linear(32, 3))
    # each of the 16 patches costs 2 x 4, the linear layer 32 x 3
    assert str(Statistics(model, (2, 1, 8, 8)).formula("macs")) == "224*batch"


class CallPerSample(nn.Module):
    """Calls a layer for each sample, beside two layers whose strides round the length."""

    def __init__(self):
        super().__init__()
        self.two, self.three = nn.Conv1d(1, 1, 2, stride=2), nn.Conv1d(1, 1, 3, stride=3)
        self.linear = nn.Linear(1, 5)

    def forward(self, x):
        each = [self.linear(sample.T) for sample in x]
        return self.two(x).sum() + self.three(x).sum() + torch.stack(each).sum()


def test_a_size_that_decides_how_often_a_layer_is_called():
    formula = Statistics(CallPerSample(), (2, 1, 30)).formula("macs")
    for batch, length in ((1, 3), (3, 10), (20, 101)):
        expected = batch * (2 * (length // 2) + 3 * (length // 3) + 5 * length)
        assert formula.subs({"batch": batch, "length": length}) == expected


class Exponential(nn.Module):
    def forward(self, x):
        return torch.zeros(2 ** min(x.shape[0], 24), 1, device=x.device) @ torch.zeros(1, 3, device=x.device)


def test_refused():
    stats, names = Statistics(Exponential(), (2, 3)), {"x": {0: "batch"}}
    with pytest.raises(FormulaError, match="no formula of macs: "):
        stats.formula("macs", dimensions=names)
    assert stats.at(dimensions=names, batch=3).macs == 2**3 * 3
    figures = stats.at(dimensions=names, batch=1000)
    assert figures.params == 0
    assert figures.to_dict()["macs"] is None
    assert "\nmacs: no formula of macs: " in str(figures)  # below the table
    with pytest.raises(FormulaError, match="this one ran for real; leave out execution='real'"):
        Statistics(nn.Linear(4, 2), (1, 4), execution="real").formula("macs")


class OneSize(nn.Module):
    def forward(self, x):
        if x.shape != (2, 3):
            raise ValueError(f"expected [2, 3], got {list(x.shape)}")
        return x


def test_a_forward_that_raises_at_other_sizes():
    stats = Statistics(OneSize(), (2, 3))
    with pytest.raises(
        FormulaError, match=r"no other size of any input dimension: at batch=3, ValueError: expected \["
    ):
        stats.formula("macs")
    with pytest.raises(FormulaError, match=r"no other size of 'n' than 3: at n=4, ValueError: expected \[2, 3\], got"):
        stats.formula("macs", dimensions={"x": {1: "n"}})


def test_sizes_that_round_to_the_recorded_one_are_no_dimension():
    """28 and 29 pixels make 13 x 13 of them, and a linear layer takes no others: 3 * 3 * 26 * 26 + 13 * 13 MACs."""
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(13 * 13, 1))
    assert str(Statistics(model, (2, 1, 28, 28)).formula("macs")) == f"{9 * 26 * 26 + 13 * 13}*batch"


def test_errors(gpt):
    with pytest.raises(InputError, match=r"unknown figure 'mac'; known: .*; did you mean 'macs'"):
        gpt.formula("mac")
    with pytest.raises(LayerNotFoundError, match=r"no layer named 'nothing' in .*; expected one of"):
        gpt.formula("macs", "nothing")
    with pytest.raises(InputError, match=r"no dimension is called 'sequenc'; expected .*; did you mean 'sequence'"):
        gpt.at(sequenc=3)
    with pytest.raises(InputError, match="batch must be an integer >= 1, got 0"):
        gpt.at(batch=0)
    with pytest.raises(InputError, match="no input is called 'x'; the inputs are ids"):
        gpt.formula("macs", dimensions={"x": {0: "n"}})
    with pytest.raises(InputError, match=r"must map positions 0 to 1 to identifiers, got \{2: 'n'\}"):
        gpt.formula("macs", dimensions={"ids": {2: "n"}})
    with pytest.raises(InputError, match="dimensions must map inputs to positions and names, got 3"):
        gpt.formula("macs", dimensions=3)
    with pytest.raises(InputError, match="dimension 'n' has the sizes 2 and 8"):
        gpt.formula("macs", dimensions={"ids": {0: "n", 1: "n"}})
    with pytest.raises(NotLiveError, match="a formula needs the live model"):
        pickle.loads(pickle.dumps(gpt)).formula("macs")
    with pytest.raises(NotLiveError):
        Statistics.from_json(gpt.to_json()).at(batch=3)


def test_files(tmp_path):
    batch = torch.export.Dim("batch", min=1, max=64)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    torch.export.save(
        torch.export.export(model, (torch.zeros(3, 4),), dynamic_shapes=({0: batch},)), tmp_path / "model.pt2"
    )
    if "serialized_exported_program.json" in zipfile.ZipFile(tmp_path / "model.pt2").namelist():
        pytest.skip("what torch 2.6 exports is not read")
    stats = Statistics(tmp_path / "model.pt2")
    formula = stats.formula("macs")
    (name,) = (symbol.name for symbol in formula.free_symbols)
    assert formula == stats.total_mult_adds_expr == 32 * sympy.Symbol(name)
    figures = stats.at(**{name: 100})
    assert (figures.macs, figures.flops, figures.params) == (3200, 6400, 40)
    assert (figures.input_bytes, figures.output_bytes) == (1600, 3200)
    assert figures.total_output_bytes == 6400
    with pytest.raises(FormulaError, match="no formula of bytes_read"):
        stats.formula("bytes_read")
    with pytest.raises(InputError, match=rf"expected {name}= \(the open dimensions of the file\), got"):
        stats.at()


def test_sizes_beyond_of_an_unknown_figure(gpt):
    with pytest.raises(InputError, match=r"unknown figure 'mac'; known: .*; did you mean 'macs'"):
        gpt.at(batch=2).beyond("mac")
