"""Accepted inputs, and the messages for unusable ones."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modelsummary import ForwardError, InputError, ModelFileError, ModelSummaryError, Statistics
from modelsummary.capture.input_data import OPTIONS
from tests.models import Call, Pair


def shapes(function=lambda self, *args, **kwargs: None, *args, **kwargs):
    return Statistics(Call(function), *args, **kwargs).root.input_size


@pytest.mark.parametrize(
    ("input_data", "expected"),
    [
        (torch.rand(2, 3), [2, 3]),
        ((torch.rand(2, 3),), [2, 3]),
        ([torch.rand(2, 3)], [2, 3]),
        ((torch.rand(2, 3), torch.rand(4)), ([2, 3], [4])),
        ((2, 3), [2, 3]),
        ([2, 3], [2, 3]),
        (torch.Size([2, 3]), [2, 3]),
        (np.int64(2) * np.ones(2, dtype=np.int64), [2]),  # an array is a tensor, never a size
        (((2, 3), (4, 5)), ([2, 3], [4, 5])),
        ([[2, 3], [4, 5]], ([2, 3], [4, 5])),
        ((np.int64(2), 3), [2, 3]),
        (np.zeros((2, 3), dtype=np.float32), [2, 3]),
        ([np.zeros((2, 3)), torch.rand(4)], ([2, 3], [4])),
        ({"x": torch.rand(2, 3)}, {"x": [2, 3]}),
        ({"x": np.zeros(3), "flag": True}, {"x": [3]}),
        ({"x": [torch.rand(1), {"y": torch.rand(2)}]}, {"x": ([1], {"y": [2]})}),
        ((torch.rand(1), [torch.rand(2), None]), ([1], ([2], None))),
        (Pair(torch.rand(1), torch.rand(2)), ([1], [2])),  # a named tuple is one argument
        ((torch.rand(1), 3), [1]),
        ((torch.rand(()),), []),
        ([{256: torch.rand(2), 512: [torch.rand(3)]}], {"256": [2], "512": ([3],)}),
        ((0, 3), [0, 3]),
    ],
)
def test_accepted_inputs(input_data, expected):
    assert shapes(input_data=input_data) == expected


def test_further_arguments_go_to_the_forward():
    def forward(self, x, y, *, scale, mode):
        assert (scale, mode) == (2.0, "fast")
        return x + y

    stats = Statistics(Call(forward), torch.rand(2), torch.rand(2), scale=2.0, mode="fast")
    assert stats.root.input_size == ([2], [2])
    stats = Statistics(Call(forward), None, torch.rand(2), torch.rand(2), scale=2.0, mode="fast")
    assert stats.root.input_size == ([2], [2])


def test_a_forward_argument_named_like_an_option_goes_into_a_dict():
    stats = Statistics(Call(lambda self, x, depth, device: x * depth), {"x": torch.rand(3), "depth": 2, "device": "b"})
    assert stats.root.output_size == [3]


def test_a_forward_may_take_numpy_arrays_as_they_are():
    def forward(self, x):
        assert isinstance(x, np.ndarray)
        return self.linear(torch.from_numpy(x)).detach().numpy()

    stats = Statistics(Call(forward, linear=nn.Linear(3, 4)), np.ones((2, 3), dtype=np.float32))
    assert (stats.execution, stats.fallback_reason) == ("real", "the forward takes numpy arrays")
    assert stats.total_mult_adds == 24
    assert (stats.root.input_size, stats.root.output_size, stats.root.output_bytes) == ([2, 3], [2, 4], 32)


def test_a_forward_may_make_its_tensors_itself():
    stats = Statistics(Call(lambda self, options: torch.rand(options.get("size", 3))), [{}])
    assert stats.root.output_size == [3]


class TakesList(nn.Module):
    def forward(self, images: list[torch.Tensor]):
        return [image * 2 for image in images]


class TakesEvaluatedList(TakesList):
    def forward(self, images):
        return super().forward(images)

    forward.__annotations__["images"] = list[torch.Tensor]  # as without "from __future__ import annotations"


@pytest.mark.parametrize("model", [TakesList(), TakesEvaluatedList()])
def test_a_list_is_one_argument_where_forward_takes_a_list(model):
    images = [torch.rand(3, 4, 4), torch.rand(3, 5, 5)]
    for input_data in (images, (images,), [images]):
        assert Statistics(model, input_data).root.input_size == ([3, 4, 4], [3, 5, 5])


# ----------------------------------------------------------------------------------- sizes and batch_dim


def test_sizes_take_the_dtype_of_the_model():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        stats = Statistics(nn.Linear(4, 5).to(dtype), (2, 4))
        assert stats.root.input_bytes == 8 * dtype.itemsize
        assert stats.root.output_bytes == 10 * dtype.itemsize


def test_sizes_take_the_dtypes_given():
    for dtypes in ([torch.long], "long", ["torch.int64"], torch.int32):
        assert Statistics(nn.Embedding(10, 4), (2, 3), dtypes=dtypes).root.output_size == [2, 3, 4]
    assert Statistics(nn.Embedding(10, 4), (2, 3), dtypes=[torch.LongTensor]).root.output_size == [2, 3, 4]
    assert Statistics(nn.Embedding(10, 4), (2, 3), dtypes=torch.long, execution="real").root.output_size == [2, 3, 4]


def test_sizes_by_argument_name():
    def forward(self, ids, scale, *, causal):
        assert causal
        return self.table(ids) * scale

    model = Call(forward, table=nn.Embedding(10, 4))
    by_name: dict = {"ids": (2, 3), "scale": [3, 4], "causal": True}
    for dtypes in (["long", torch.float32], {"ids": torch.int32}):
        assert Statistics(model, by_name, dtypes=dtypes).root.output_size == [2, 3, 4]
        assert Statistics(model, dtypes=dtypes, **by_name).root.output_size == [2, 3, 4]


class Resize(nn.Module):
    def forward(self, x, input_size: tuple[int, int]):
        return nn.functional.interpolate(x, input_size)


@pytest.mark.parametrize("x", [torch.rand(1, 1, 2, 2), (1, 1, 2, 2)])
def test_a_tuple_beside_tensors_or_for_an_annotated_parameter_is_a_constant(x):
    assert Statistics(Resize(), {"x": x, "input_size": (4, 5)}).root.output_size == [1, 1, 4, 5]


def test_input_size_is_another_name_unless_the_forward_has_it():
    assert Statistics(nn.Linear(3, 4), input_size=(2, 3)).root.output_size == [2, 4]
    assert Statistics(Call(lambda self, x, y: x + y), input_size=[(2, 3), (3,)]).root.output_size == [2, 3]
    assert Statistics(Resize(), (1, 1, 2, 2), input_size=(4, 5)).root.output_size == [1, 1, 4, 5]


@pytest.mark.parametrize(
    ("input_data", "advice"),
    [
        ((3, 8, 8), r"; did you forget the batch dimension\? \(1, 3, 8, 8\) works$"),
        (torch.rand(3, 8, 8), r"; did you forget the batch dimension\? \(1, 3, 8, 8\) works$"),
        ((2, 8, 8, 3), r"; did you mean \(2, 3, 8, 8\)\? Channels come second, before height and width$"),
        ((1, 3, 9, 8), r"; the layer takes 288 features in the last dimension, and got 336$"),
        ((1, 4, 8, 8), r"; the layer takes 4 dimensions, the second of 3 channels$"),
        ((3, 8), r"; the layer takes 4 dimensions, the second of 3 channels$"),
        (torch.rand(1, 3, 8, 8).double(), r"; the input is torch.float64, the parameters torch.float32: convert one"),
    ],
)
def test_a_forward_that_fails_says_which_size_would_work(input_data, advice):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2))
    with pytest.raises(ForwardError, match=advice):
        Statistics(model, input_data)


def raises(self, x):
    raise AssertionError


@pytest.mark.parametrize(
    ("model", "input_data", "advice"),
    [
        (nn.Embedding(4, 2), torch.rand(3), r"; the input is torch.float32: pass indices as integers, x.long\(\)$"),
        (nn.ModuleList([nn.Linear(2, 2)]), (1, 2), r"; call its modules in the forward of another one, or pass no"),
        (Call(raises), (2, 2), r"AssertionError: test_inputs.py:\d+: raise AssertionError$"),
        pytest.param(
            Call(lambda self, x: x.cuda()),
            (2, 2),
            "; the forward asks for CUDA, which this machine does not have: use the device of its input, x.device$",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the forward runs"),
        ),
    ],
)
def test_a_forward_that_fails_says_what_to_change(model, input_data, advice):
    with pytest.raises(ForwardError, match=advice):
        Statistics(model, input_data)


def test_a_batch_with_labels_and_a_dict_that_is_one_argument_are_told_how_to_be_passed():
    with pytest.raises(InputError, match=r"pass its arguments alone: labels of a batch are for the loss, loss=$"):
        Statistics(nn.Linear(2, 2), [torch.rand(3, 2), torch.zeros(3)])

    class TakesDict(nn.Module):
        def forward(self, batch, *, scale):
            return batch["x"] * scale

    model = TakesDict()
    with pytest.raises(InputError, match=r"; remove 'x', or pass \[batch\] if a dict is one argument$"):
        Statistics(model, {"x": torch.rand(2)}, scale=2)
    assert Statistics(model, [{"x": torch.rand(2)}], scale=2).root.output_size == [2]


def test_several_sizes_as_further_arguments_are_a_list_of_sizes():
    with pytest.raises(ForwardError, match=r"for several inputs pass a list of sizes: \[\(1, 3\), \(1, 4\)\]$"):
        Statistics(Call(lambda self, x, y: torch.cat([x, y], 1)), (1, 3), (1, 4))


def test_a_size_beside_a_tensor_is_said_to_be_a_tuple():
    model = Call(lambda self, ids, mask: self.table(ids) * mask.view(*mask.shape, 1), table=nn.Embedding(10, 4))
    ids, mask = torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 5)
    for arguments, advice in (
        ({"ids": ids, "mask": (1, 5)}, r"mask=\(1, 5\) is a tuple .* dtype=torch.float32, device='meta'\)$"),
        ({"ids": (1, 5), "mask": mask}, r"ids=\(1, 5\) is a tuple .* dtype=torch.int64, device='meta'\)$"),
        ({"ids": (1, 9), "mask": mask}, r"ids=\(1, 9\) is a tuple beside tensors"),
    ):
        with pytest.raises(ForwardError, match=advice):
            Statistics(model, arguments)
    scaled = Call(lambda self, x, scale, bias: x * scale + bias.exp())
    with pytest.raises(ForwardError, match=r"; argument 3, \(4,\), is a tuple beside tensors"):
        Statistics(scaled, (2, 4), 3, (4,))


def test_batch_dim_inserts_a_batch_of_one_printed_as_minus_one():
    stats = Statistics(nn.Conv2d(3, 8, 3), (3, 8, 8), batch_dim=0)
    assert stats.root.input_size == [1, 3, 8, 8]
    assert "[-1, 3, 8, 8]" in str(stats)
    assert "[-1, 8, 6, 6]" in str(stats)
    assert stats.total_mult_adds == Statistics(nn.Conv2d(3, 8, 3), (1, 3, 8, 8)).total_mult_adds
    stats = Statistics(nn.LSTM(4, 5), (7, 4), batch_dim=1)
    assert stats.root.input_size == [7, 1, 4]
    assert "[7, -1, 4]" in str(stats)
    last = Statistics(Call(lambda self, x: self.lstm(x)[0][-1], lstm=nn.LSTM(4, 5)), (7, 4), batch_dim=1)
    assert "[1, 5]" in str(last)  # the second dimension is not the batch here


def test_a_tensor_brings_its_own_batch():
    stats = Statistics(nn.Conv2d(3, 8, 3), torch.rand(5, 3, 8, 8), batch_dim=0)
    assert stats.root.input_size == [5, 3, 8, 8]
    assert "[-1, 3, 8, 8]" in str(stats)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_any_size_and_batch_dim(size, data):
    batch_dim = data.draw(st.none() | st.integers(0, len(size)))
    expected = size if batch_dim is None else [*size[:batch_dim], 1, *size[batch_dim:]]
    assert shapes(input_data=tuple(size), batch_dim=batch_dim) == expected


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"input_data": (1, -3)}, r"input size \(1, -3\) holds -3; sizes are integers >= 0"),
        ({"input_data": (1, 2.5)}, r"input size \(1, 2\.5\) holds 2\.5; sizes are integers >= 0"),
        ({"input_data": (1, True)}, r"holds True; sizes are integers >= 0"),
        ({"input_data": [(1, 3), (2, -1)]}, r"input size \(2, -1\) holds -1"),
        ({"input_data": ()}, r"no tensor found in input_data=\(\)"),
        ({"input_data": {}}, r"no tensor found in input_data=\{\}; pass tensors, a size such as"),
        ({"input_data": "resnet"}, r"no tensor found in input_data='resnet'"),
        ({"input_data": 3}, r"no tensor found in input_data=3"),
        ({"input_data": "2, 4"}, r"; did you mean \(2, 4\)\?$"),
        ({"input_data": ["2", "4"]}, r"; did you mean \(2, 4\)\?$"),
        ({"input_data": (None, 4)}, r"; did you mean \(1, 4\)\?$"),
        (
            {"input_data": "\N{SUPERSCRIPT TWO}, 4"},
            r"or None to list the layers without a forward$",
        ),  # a digit, no decimal
        ({"input_data": [None]}, r"no tensor found in input_data=\[None\]"),
        ({"input_data": {"x": 5}}, r"no tensor found in input_data=\{'x': 5\}"),
        ({"input_data": {1: torch.rand(1)}}, r"dict must be names of forward's arguments, got 1; pass positional"),
        ({"input_data": [(1, 3), torch.rand(1)]}, r"mixes sizes and tensors"),
        (
            {"input_data": (1, 3), "dtypes": [torch.long] * 2},
            r"dtypes has 2 entries for 1 size\(s\): \[\(1, 3\)\]; pass one per size, and several sizes as a list$",
        ),
        (
            {"input_data": (1, 3), "dtypes": ["lnog"]},
            r"dtypes must be a torch\.dtype, or its name such as 'bfloat16', got 'lnog'; did you mean 'long'\?",
        ),
        ({"input_data": (1, 3), "dtypes": int}, r"dtypes must be a torch\.dtype, .* got <class 'int'>"),
        ({"input_data": (1, 3), "dtypes": {"x": "long"}}, r"dtypes names the argument 'x', but no size has one"),
        (
            {"input_data": {"ids": (1, 3)}, "dtypes": {"isd": "long"}},
            r"dtypes names the argument 'isd', but the sizes are for ids; did you mean 'ids'\?",
        ),
        (
            {"input_data": (1, 3), "input_size": (1, 3)},
            r"input_size=\(1, 3\) and input_data=\(1, 3\) are two names of one argument; pass one",
        ),
        ({"input_data": torch.rand(1), "dtypes": [torch.long]}, r"which have a dtype; leave dtypes out$"),
        (
            {"input_data": {"x": {"ids": (2, 7)}}, "dtypes": {"ids": "long"}},
            r"describes sizes, but input_data holds sizes inside of an argument; pass tensors there, such as",
        ),
        ({"input_data": (1, 3), "batch_dim": 3}, r"batch_dim=3 does not fit the input size \(1, 3\); expected 0 to 2"),
        ({"input_data": (1, 3), "batch_dim": -1}, r"batch_dim must be an integer >= 0 or None, got -1"),
        ({"input_data": (1, 3), "batch_dim": "0"}, r"batch_dim must be an integer >= 0 or None, got '0'"),
        ({"input_data": (1, 3), "batch_dim": True}, r"batch_dim must be an integer >= 0 or None, got True"),
        ({"dtypes": [torch.long]}, r"describes sizes, but input_data holds none"),
        ({"execution": "fast"}, r"execution='fast' is unknown"),
        ({"input_data": (1, 3), "depth": True}, r"depth must be an integer >= 0.*, got True"),
        ({"input_data": (1, 3), "device": "gpu"}, r"device must name a torch device, got 'gpu'"),
        ({"input_data": np.array(["a"])}, r"numpy array that torch cannot convert"),
        (
            {"input_data": (1, 3), "execution": "fast"},
            r"execution='fast' is unknown; expected 'auto', 'shape' or 'real'",
        ),
        ({"input_data": (1, 3), "depth": -1}, r"depth must be an integer >= 0.*, got -1"),
    ],
)
def test_bad_input_is_echoed_with_a_remedy(kwargs, message):
    with pytest.raises(InputError, match=message) as caught:
        Statistics(Call(lambda self, *args, **kw: None), **kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda: (torch.rand(1) for _ in range(2)), lambda: [iter([torch.rand(1)])]])
def test_a_generator_would_be_empty_the_second_time(make):
    with pytest.raises(InputError, match="can be read only once; pass a list"):
        Statistics(nn.Linear(1, 1), make())


@pytest.mark.parametrize("model", [None, 3, nn.Linear, lambda x: x])
def test_not_a_module(model):
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module, got"):
        Statistics(model, (1, 3))


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


def test_the_error_of_a_wrong_call_says_what_to_do():
    with pytest.raises(InputError, match=r"'b': .* of Sum.forward\(a, b\); pass a list or dict of tensors"):
        Statistics(Sum(), (2, 4))
    with pytest.raises(InputError, match=r"remove 'sizes'$"):
        Statistics(nn.Linear(1, 1), (1, 1), sizes=(1, 1))
    with pytest.raises(InputError, match=r"remove 'col_names', or call modelsummary\.summary"):
        Statistics(nn.Linear(1, 1), (1, 1), col_names=["macs"])
    with pytest.raises(InputError, match=r"remove 'batchdim'; did you mean 'batch_dim'\?"):
        Statistics(nn.Linear(1, 1), (1, 1), batchdim=0)
    with pytest.raises(InputError, match=r"remove 'inputs'; did you mean .*'input'"):
        Statistics(nn.Linear(1, 1), None, inputs=torch.rand(1, 1))
    assert [*inspect.signature(Statistics).parameters][1:] == ["input_data", "args", *OPTIONS[1:], "kwargs"]
    with pytest.raises(InputError, match=r"did you mean \(3, 8, 8\)\?$"):
        Statistics(nn.Conv2d(3, 1, 1), 3, 8, 8)


def test_a_text_is_the_path_of_a_file():
    with pytest.raises(ModelFileError, match=r"^folder '\.' is not a file; expected a file"):
        Statistics(".", (1, 3, 8, 8))
    with pytest.raises(ModelFileError, match=r"'resnet18' does not exist; expected a file .*, or the model itself"):
        Statistics("resnet18", (1, 3))


def test_nothing_found_explains_a_failing_forward():
    with pytest.raises(InputError, match=r"no tensor found in input_data="):
        Statistics(nn.Linear(1, 1), [{}])


def test_what_is_not_a_model_is_told_what_to_pass():
    with pytest.raises(InputError, match=r"got tuple: \(1, 1\); the model comes first: Statistics\(model"):
        Statistics((1, 1), nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"got OrderedDict.*; if these are weights, make the model and call its load_"):
        Statistics(nn.Linear(1, 1).state_dict(), (1, 1))


def test_a_class_instead_of_an_instance():
    with pytest.raises(InputError, match="pass an instance, not the class"):
        Statistics(nn.Linear)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((torch.rand(1), torch.rand(1)), {}), ((torch.rand(1),), {"mask": None}), ((), {"x": torch.rand(1)})],
)
def test_forward_arguments_that_do_not_fit_name_the_signature(args, kwargs):
    with pytest.raises(InputError, match=r"Linear\.forward\(input: .*Tensor\) -> "):
        Statistics(nn.Linear(1, 1), args or None, **kwargs)


def test_an_argument_given_twice():
    with pytest.raises(InputError, match=r"\['x'\] given twice.*; pass each once$"):
        Statistics(Call(lambda self, x: x), {"x": torch.rand(1)}, x=torch.rand(1))


def test_device_mismatch():
    if torch.cuda.is_available():
        with pytest.raises(InputError, match="device mismatch: device='cuda', but the model is on cpu"):
            Statistics(nn.Linear(1, 1), (1, 1), device="cuda")
    else:
        with pytest.raises(InputError, match="device='cuda' is not available on this machine"):
            Statistics(nn.Linear(1, 1), (1, 1), device="cuda")


@pytest.mark.gpu
def test_inputs_on_another_device_than_the_model():
    with pytest.raises(InputError, match="device mismatch: the model is on cpu, an input of shape"):
        Statistics(nn.Linear(1, 1), torch.rand(1, 1, device="cuda"))
    model = nn.Linear(1, 1).cuda()
    assert Statistics(model, torch.rand(1, 1), device="cuda", execution="real").execution == "real"


def test_every_error_has_the_common_base():
    with pytest.raises(ModelSummaryError):
        Statistics(nn.Linear(1, 1), "x")
    assert issubclass(InputError, (TypeError, ValueError))


def test_a_forward_that_takes_only_a_number_runs_with_it_by_name():
    class Sampler(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, n):
            return self.linear(torch.randn(n, 4))

    assert Statistics(Sampler(), n=3).root.output_size == [3, 2]
    with pytest.raises(InputError, match=r"=3; pass .*, numbers by the names of forward's arguments, or None"):
        Statistics(Sampler(), 3)


def test_values_in_a_list_are_told_to_be_passed_as_a_tensor():
    with pytest.raises(InputError, match=r"input size \(.{70,80} holds 0.25; .* pass values as a tensor, torch.tensor"):
        Statistics(nn.Linear(4, 2), [[0.25] * 40])
