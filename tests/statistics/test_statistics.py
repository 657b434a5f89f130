"""The public object: access, totals, errors, pickling."""

from __future__ import annotations

import contextlib
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import DataDependentError, ForwardError, InputError, LayerNotFoundError, Statistics
from tests.models import Call, Decoder, Stack
from tests.untouched import untouched


@pytest.fixture(scope="module")
def stats():
    return Statistics(Stack(), (2, 4))


def test_access_by_name(stats):
    assert stats["layers.0"].output_size == [2, 4]
    assert stats[""] is stats.root
    assert len(stats) == 6
    assert list(stats) == stats.summary_list
    assert "layers.0" in stats._ipython_key_completions_()


def test_an_unknown_name_names_close_matches(stats):
    with pytest.raises(LayerNotFoundError) as caught:
        stats["layer.0"]
    assert str(caught.value).startswith("no layer named 'layer.0' in Stack; did you mean 'layers.0'")
    assert isinstance(caught.value, KeyError)


def test_a_message_is_one_line(stats):
    with pytest.raises(InputError, match=r"^other must be .*: Sequential\( \(0\): ReLU\(\) \); pass Statistics"):
        stats.diff(nn.Sequential(nn.ReLU()))


def test_a_name_is_a_string(stats):
    with pytest.raises(InputError, match=r"fqn must be a fully qualified name such as .* got 3"):
        stats[3]


def test_totals(stats):
    assert stats.total_params == 20 + 20 + 10 + 15
    assert stats.trainable_params == stats.total_params
    assert stats.total_mult_adds == 32 + 32 + 16
    assert stats.total_flops == 2 * stats.total_mult_adds
    assert stats.total_param_bytes == 4 * stats.total_params
    assert stats.total_input_bytes == 2 * 4 * 4
    assert stats.total_output_bytes == 4 * (8 + 8 + 4)  # the three leaf calls
    assert stats.total_buffer_bytes == 0


def test_it_pickles_without_the_model(stats):
    again = pickle.loads(pickle.dumps(stats))
    assert str(again) == str(stats)
    assert again["layers.0"].module is None
    assert stats["layers.0"].module is not None
    assert again.total_mult_adds == stats.total_mult_adds
    assert again["heads.used"].parent_info is again["heads"]


def test_errors_pickle():
    error = pickle.loads(pickle.dumps(DataDependentError("aten.nonzero")))
    assert (error.operator, str(error)) == ("aten.nonzero", str(DataDependentError("aten.nonzero")))
    error = pickle.loads(pickle.dumps(LayerNotFoundError("no layer")))
    assert str(error) == "no layer"


def failing(self, x, mask=None):
    return self.second(self.first(x))


def test_a_failing_layer_is_named_and_the_rest_is_kept():
    model = nn.Sequential(nn.ReLU(), Call(failing, first=nn.Linear(4, 5), second=nn.Linear(6, 7)))
    with untouched(model), pytest.raises(ForwardError) as caught:
        Statistics(model, (2, 4))
    message = str(caught.value)
    assert message.startswith("forward of 1.second (Linear) failed with input [2, 5]: RuntimeError: ")
    assert message.endswith("(2x5 and 6x7); the layer takes 6 features in the last dimension, and got 5")
    assert isinstance(caught.value.__cause__, RuntimeError)
    partial = caught.value.partial
    assert partial["1.first"].macs == 40
    assert partial["1.second"].note == "raised an exception"
    assert partial["1.second"].input_size == [2, 5]
    assert [row.fqn for row in partial] == ["0", "1", "1.first", "1.second"]
    assert "1.second: raised an exception" in str(partial)


def test_a_failure_outside_of_all_layers_names_the_model():
    with pytest.raises(ForwardError, match=r"^forward of Call failed with input \[2\]: ZeroDivisionError: "):
        Statistics(Call(lambda self, x: 1 / 0), (2,))


def test_a_failure_after_a_caught_one_names_the_right_layer():
    def risky(self, x):
        with contextlib.suppress(RuntimeError):
            self.wrong(x)
        return self.also_wrong(x)

    with pytest.raises(ForwardError, match=r"forward of also_wrong \(Linear\)"):
        Statistics(Call(risky, wrong=nn.Linear(3, 3), also_wrong=nn.Linear(5, 5)), (2, 4))


def test_indices_given_by_size_need_a_dtype():
    with pytest.raises(
        ForwardError, match=r'given by size are torch\.float32: for indices pass dtypes="long", or a list'
    ):
        Statistics(nn.Embedding(10, 4), (2, 3), execution="real")


def test_other_dtypes_are_not_taken_for_indices():
    with pytest.raises(ForwardError, match=r"given by size are torch\.float32: pass another dtype with dtypes=, or"):
        Statistics(nn.Linear(3, 4).double(), (2, 3), execution="real", dtypes=torch.float32)


def test_huge_models_take_no_memory():
    """A 400-billion-parameter stack: shapes only, nothing could be allocated."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(65536, 65536, bias=False) for _ in range(94)])
    stats = Statistics(model, (1, 65536))
    assert stats.total_params == stats.total_mult_adds == 94 * 2**32
    assert stats.execution == "shape"


def test_real_execution_counts_the_same():
    model = Decoder().eval()
    ids = torch.zeros(2, 6, dtype=torch.long)
    shape, real = (Statistics(model, {"input_ids": ids}, execution=how) for how in ("shape", "real"))
    assert (shape.execution, real.execution) == ("shape", "real")
    assert shape.total_mult_adds == real.total_mult_adds
    assert [(row.fqn, row.output_size, row.macs) for row in shape] == [
        (row.fqn, row.output_size, row.macs) for row in real
    ]


def test_real_execution_of_a_meta_model_is_refused():
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(InputError, match="execution='real' needs values, but the model has tensors on meta"):
        Statistics(model, (2, 4), execution="real")


def test_a_forward_inside_of_autocast_is_as_the_model_would_run():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = Statistics(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (2, 4), execution="real")
    assert stats["0"].output_bytes == 2 * 8


def test_the_version_comes_from_one_place():
    from importlib.metadata import version

    assert modelsummary.__version__ == version("torch-modelsummary")


@pytest.mark.gpu
def test_a_model_on_an_accelerator():
    device = torch.accelerator.current_accelerator()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(6, 4)).to(device)
    for execution in ("shape", "real"):
        with untouched(model):
            stats = Statistics(
                Call(lambda self, x: self.m[1](self.m[0](x)), m=model), (2, 3, 8, 8), execution=execution
            )
        assert stats.total_mult_adds == 2 * 8 * 36 * 27


@pytest.mark.gpu
def test_recurrent_layers_on_an_accelerator():
    model = nn.LSTM(64, 128, 2, batch_first=True).to(torch.accelerator.current_accelerator())
    for execution in ("shape", "real"):
        assert Statistics(model, (2, 50, 64), execution=execution).total_mult_adds == 22_937_600


# -------------------------------------------------------------------------------------------- data and live models


def test_data_cannot_run(tmp_path):
    """Statistics without a live model say so in one sentence, and ``hasattr`` finds no such method."""
    stats = Statistics(nn.Linear(4, 2), (3, 4))
    loaded = modelsummary.ModelStatistics.from_json(stats.to_json())
    assert not isinstance(loaded, Statistics)
    assert not hasattr(loaded, "split")
    assert loaded.total_mult_adds == stats.total_mult_adds == 24
    live = {name for name in dir(Statistics) if name[0] != "_" and not hasattr(modelsummary.ModelStatistics, name)}
    assert {"split", "simulate", "plan", "parallel_plan", "live"} <= live
    for name in sorted(live):
        with pytest.raises(InputError, match=f"{name} needs the live model and an input"):
            getattr(loaded, name)
    with pytest.raises(AttributeError, match="no attribute 'spit'"):
        loaded.spit(2)
    again = pickle.loads(pickle.dumps(stats))
    with pytest.raises(InputError, match="needs the live model"):
        again.memory()
    assert stats.live.uninitialized is None


def test_options_of_a_step_are_checked():
    stats = Statistics(nn.Linear(4, 2), (3, 4))
    for call in (stats.measure_memory, partial(stats.max_batch_size, 10**6), partial(stats.suggest_checkpoint, 10**6)):
        with pytest.raises(
            InputError, match=r"unknown option 'optimiser' of a step; expected .*; did you mean 'optimizer'\?"
        ):
            call(optimiser="adam")
