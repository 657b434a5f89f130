"""The command line: what it prints, its exit status, and its errors in one line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from modelsummary import InputError, MissingExtraError, ModelStatistics, Statistics
from modelsummary.cli.arguments import parse_budget
from modelsummary.cli.commands import run
from modelsummary.operators.kernels import MODES
from modelsummary.serving.cache import CACHES
from tests.files.test_onnx import conv
from tests.models import Call


def mlp(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def embedding():
    return Call(lambda self, ids, scale: self.table(ids) * scale, table=nn.Embedding(10, 3))


def broken():
    raise ValueError("no such thing")


READY = mlp()
ROOT = Path(__file__).parents[2]
MLP = "tests.cli.test_commands:mlp"


def output(capsys, *arguments, status=0):
    assert run(arguments) == status
    return capsys.readouterr()


def test_text(capsys):
    said = output(capsys, MLP, "--input", "2,4")
    assert said.out == f"{Statistics(mlp(), (2, 4))}\n"
    assert said.err == ""
    assert output(capsys, MLP).out == f"{Statistics(mlp())}\n"
    assert output(capsys, "tests.cli.test_commands:READY", "--input", "2,4").out == f"{Statistics(mlp(), (2, 4))}\n"


def test_a_model_in_a_file_beside_its_modules(capsys, tmp_path, monkeypatch):
    (tmp_path / "width_of_net.py").write_text("WIDTH = 5\n")
    (tmp_path / "net.py").write_text(
        "from torch import nn\nfrom width_of_net import WIDTH\n\n\n"
        "class MyNet(nn.Linear):\n    def __init__(self):\n        super().__init__(4, WIDTH)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "net", None)  # any other module of this name
    assert "[2, 5]" in output(capsys, f"{tmp_path}/net.py:MyNet", "--input", "2,4").out
    said = output(capsys, f"{tmp_path}/net.py:MyNett", status=2).err
    assert "has no 'MyNett'; did you mean 'MyNet'?" in said


def test_a_bare_name_is_that_of_torchvision(capsys):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    assert output(capsys, "alexnet").out == output(capsys, "torchvision:alexnet").out


def test_sorted_rows(capsys):
    said = output(capsys, MLP, "--input", "2,4", "--sort", "macs").out
    assert said == f"{Statistics(mlp(), (2, 4)).table(sort='macs')}\n"


def test_settings_mode_and_table(capsys):
    said = output(
        capsys, MLP, "--kwargs", '{"width": 16}', "--input", "2,4", "--mode", "eval", "--columns",
        "num_params,training", "--depth", "0", "--units", "K",
    )  # fmt: skip
    assert said.out == Statistics(mlp(16).eval(), (2, 4)).table(["num_params", "training"], depth=0, units="K") + "\n"


def test_dtype(capsys):
    said = output(capsys, MLP, "--input", "2,4", "--dtype", "bfloat16", "--columns", "params_bytes", "--depth", "0").out
    assert said == f"{Statistics(mlp().bfloat16(), (2, 4)).table(['params_bytes'], depth=0)}\n"
    assert "such as 'bfloat16', got 'long'" in output(capsys, MLP, "--dtype", "long", status=2).err
    assert "the dtype of 'net.onnx' is fixed" in output(capsys, "net.onnx", "--dtype", "half", status=2).err


@pytest.mark.parametrize("inputs", [["5:long", "3"], ["ids=5:long", "scale=3"], ["scale=3", "ids=5:int32"]])
def test_inputs(capsys, inputs):
    arguments = [part for each in inputs for part in ("--input", each)]
    facts = json.loads(output(capsys, "tests.cli.test_commands:embedding", *arguments, "--format", "json").out)
    assert facts["rows"][0]["output_size"] == [5, 3]
    scalar = output(
        capsys, "tests.cli.test_commands:embedding", "--input", "5:long", "--input", ":float64", "--format", "json"
    )
    assert json.loads(scalar.out)["rows"][0]["output_bytes"] == 5 * 3 * 4


@pytest.mark.parametrize("form", ["csv", "markdown", "latex", "html"])
def test_formats(capsys, form, tmp_path):
    expected = getattr(Statistics(mlp(), (2, 4)), f"to_{form}")(columns=["fqn", "macs"], depth=1).rstrip() + "\n"
    arguments = [MLP, "--input", "2,4", "--format", form, "--columns", "fqn,macs", "--depth", "1"]
    assert output(capsys, *arguments).out.replace("\r\n", "\n") == expected.replace("\r\n", "\n")
    assert output(capsys, *arguments, "--output", str(tmp_path / "out")).out == ""
    assert (tmp_path / "out").read_bytes().decode().replace("\r\n", "\n") == expected.replace("\r\n", "\n")


def test_json(capsys):
    arguments = [MLP, "--input", "2,4", "--format", "json", "--memory", "adam", "--split", "2"]
    text = output(capsys, *arguments).out
    stats = Statistics(mlp(), (2, 4))
    assert str(ModelStatistics.from_json(text)) == str(stats)
    facts = json.loads(text)
    assert facts["memory"]["peak_bytes"] == stats.memory(optimizer="adam").peak
    assert facts["stages"] == stats.split(2).to_records()


def test_memory_on_an_accelerator_that_is_not_here(capsys):
    arguments = [MLP, "--input", "2,4", "--device", "RTX 4090"]
    stats = Statistics(mlp(), (2, 4))
    on_card = stats.memory(optimizer="adamw", device="RTX 4090")
    assert output(capsys, *arguments, "--memory", "adamw").out == f"{stats}\n\n{on_card}\n"
    said = output(capsys, *arguments, status=2).err
    assert "or add --memory for an accelerator" in said
    assert (
        "--latency measures on this machine"
        in output(capsys, *arguments, "--memory", "none", "--latency", status=2).err
    )
    unknown = output(capsys, MLP, "--input", "2,4", "--device", "RTX 4091", "--memory", "none", status=2).err
    assert unknown.startswith("error: no accelerator 'RTX 4091' in the table; the nearest are RTX 4090")


def test_differences_from_the_json_of_a_model(capsys, tmp_path):
    path = tmp_path / "before.json"
    output(capsys, MLP, "--input", "2,4", "--format", "json", "--output", str(path))
    said = output(capsys, MLP, "--input", "2,4", "--diff", str(path)).out
    assert str(Statistics(mlp(), (2, 4)).diff(ModelStatistics.from_json(path))) in said


def branching():
    return Call(lambda self, x: self.fc(x) if x.sum() < torch.inf else x, fc=nn.Linear(4, 4))


@pytest.mark.parametrize("command", ["summarize", "explore", "check", "compare", "calibrate"])
def test_values_for_a_forward_that_reads_them(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELSUMMARY_CACHE", str(tmp_path))
    model = ["tests.cli.test_commands:branching", "--input", "2,4"]
    assert "execution='auto' or 'real', with a model and inputs that hold values (in a shell: --values)" in (
        output(capsys, command, *model, status=2).err
    )
    output(capsys, command, *model, "--values", status=command == "check")  # which says that it ran for real


def test_measuring_logs_nothing(tmp_path):
    """Kineto writes to the descriptor, past ``sys.stderr``."""
    arguments = [sys.executable, "-m", "modelsummary", "calibrate", MLP, "--input", "2,4"]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environment["MODELSUMMARY_CACHE"] = str(tmp_path)
    said = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    assert "operator calls measured" in said.stdout


def test_more_than_the_table(capsys):
    stats = Statistics(mlp(), (2, 4))
    said = output(capsys, MLP, "--input", "2,4", "--memory", "none", "--split", "2").out
    assert said == f"{stats}\n\n{stats.memory()}\n\n{stats.split(2)}\n"
    assert str(stats.memory("inference")) in output(capsys, MLP, "--input", "2,4", "--memory", "inference").out
    assert output(capsys, MLP, "--input", "2,4", "--memory", "AdamW").out.endswith(
        f"{stats.memory(optimizer='adamw')}\n"
    )
    assert "Latency (ms)" in output(capsys, MLP, "--input", "2,4", "--latency").out


def test_diff(capsys):
    said = output(capsys, MLP, "--input", "2,4", "--diff", "tests.cli.test_commands:READY").out
    other = Statistics(mlp(), (2, 4))
    assert said == f"{Statistics(mlp(), (2, 4)).diff(other)}\n"
    text = output(capsys, MLP, "--kwargs", "{}", "--diff", "tests.cli.test_commands:embedding", "--format", "json").out
    assert json.loads(text)["diff"]


def test_budgets(capsys):
    # 4 * 8 + 8 + 8 * 2 + 2 parameters, 4 * 8 + 8 * 2 multiply-adds a sample
    within = ["--max-params", "58", "--max-macs", "0.096K", "--max-memory", "1MiB"]
    said = output(capsys, MLP, "--input", "2,4", *within)
    assert said.err == ""
    beyond = ["--max-params", "57", "--max-macs", "95", "--max-memory", "0.3kB"]
    said = output(capsys, MLP, "--input", "2,4", *beyond, status=1)
    peak = Statistics(mlp(), (2, 4)).memory("inference").peak
    assert said.err.splitlines() == [
        "exceeded: 58 params, of 57 allowed",
        "exceeded: 96 macs, of 95 allowed",
        f"exceeded: {peak} memory bytes, of 300 allowed",
    ]
    training = Statistics(mlp(), (2, 4)).memory(optimizer="adam").peak
    arguments = [MLP, "--input", "2,4", "--memory", "adam", "--max-memory"]
    assert output(capsys, *arguments, str(training)).err == ""
    assert f"{training:,} memory bytes" in output(capsys, *arguments, str(training - 1), status=1).err


def inverse():
    return Call(lambda self, x: torch.linalg.inv(self.linear(x)), linear=nn.Linear(2, 2))


def test_a_budget_of_growth(capsys, tmp_path):
    """58 parameters at a width of 8, 65 at 9, which is 12.07 % more; 2 x 48 multiply-adds, then 2 x 54: 12.5 % more."""
    before = str(tmp_path / "before.json")
    output(capsys, MLP, "--input", "2,4", "--format", "json", "--output", before)
    wider = [MLP, "--kwargs", '{"width": 9}', "--input", "2,4", "--diff", before, "--max-growth"]
    assert output(capsys, *wider, "12.5%").err == ""
    assert output(capsys, *wider, "12.4 %", status=1).err == "exceeded: 108 macs, of 107 allowed\n"
    assert output(capsys, *wider, "0%", status=1).err.splitlines() == [
        "exceeded: 65 params, of 58 allowed",
        "exceeded: 108 macs, of 96 allowed",
        "exceeded: 260 bytes of parameters and buffers, of 232 allowed",
    ]
    assert "which need an --input" in output(capsys, MLP, "--diff", before, "--max-growth", "5%", status=2).err


def test_a_budget_is_not_kept_by_what_is_not_counted(capsys):
    said = output(capsys, "tests.cli.test_commands:inverse", "--input", "2,2", "--max-macs", "100", status=1)
    assert said.err == "unknown: at least 8 macs, of 100 allowed; not counted: aten.linalg_inv_ex\n"
    assert output(capsys, "tests.cli.test_commands:inverse", "--input", "2,2", "--max-params", "6").err == ""


@pytest.mark.slow
def test_a_budget_of_a_file_needs_the_open_dimensions(capsys, tmp_path):
    path = conv(tmp_path, batch="batch")  # 4608 multiply-adds of one image
    said = output(capsys, str(path), "--max-macs", "5000", status=2).err
    assert "multiply-adds depend on batch; pass numbers in --input x=batch,3,8,8" in said
    assert output(capsys, str(path), "--max-params", "1M").err == ""
    assert output(capsys, str(path), "--max-macs", "9216", "--input", "x=2,3,8,8").err == ""
    assert "exceeded" in output(capsys, str(path), "--max-macs", "9215", "--input", "x=2,3,8,8", status=1).err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_budgets_of_the_example(tmp_path):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    command = tmp_path / "modelsummary"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m modelsummary "$@"\n')
    command.chmod(0o755)
    script = (ROOT / "examples/budget.sh").read_text()
    kept, exceeded = (
        subprocess.run(
            ["bash", "-c", text],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        for text in (script, script.replace("--max-params 4M", "--max-params 3M"))
    )
    assert (kept.returncode, kept.stderr) == (0, "")
    assert (exceeded.returncode, exceeded.stderr) == (1, "exceeded: 3,504,872 params, of 3,000,000 allowed\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: MODEL"),
        (["mlp"], "cannot find model 'mlp'; expected torchvision:NAME"),
        (["nowhere:mlp"], "module 'nowhere' cannot be imported: No module named 'nowhere'; expected torchvision:NAME"),
        (["tests.cli.test_commands:mpl"], "module 'tests.cli.test_commands' has no 'mpl'; did you mean 'mlp'?"),
        (["net.py"], "net.py is a file of code: add its class or function, net.py:NAME"),
        (["net.py:Net"], "file 'net.py' does not exist"),
        ([MLP, "--input", "2,4", "--memory", "adamv"], "got 'adamv'; did you mean 'adam' or 'adamw'?"),
        (
            [MLP, "--input", "2,4", "--sort", "mcas"],
            "; did you mean 'macs'?",
        ),
        ([MLP, "--input", "2,4", "--sort", "macs", "--format", "csv"], "--sort is for the printed table"),
        (["tests.cli.test_commands:MLP"], "must be a function or class that makes a module, got 'tests.cli"),
        (["os:getcwd"], "os:getcwd must make a torch.nn.Module, got"),
        (
            ["tests.cli.test_commands:broken"],
            "making 'tests.cli.test_commands:broken' failed: ValueError: no such thing",
        ),
        ([MLP, "--kwargs", '{"depth": 1}'], "unexpected keyword argument 'depth'"),
        ([MLP, "--kwargs", "{"], """expected a JSON object such as '{"num_classes": 10}', got '{'"""),
        ([MLP, "--kwargs", "[1]"], """expected a JSON object such as '{"num_classes": 10}', got '[1]'"""),
        ([MLP, "--input", "2;4"], "expected a size such as 1,3,224,224 or ids=1,128:long, got '2;4'"),
        ([MLP, "--input", "2,4:nofloat"], "the end of '2,4:nofloat' must be a torch.dtype"),
        ([MLP, "--input", "2,4", "--input", "y=2"], "name all inputs differently, or none"),
        ([MLP, "--input", "2,5"], "forward of 0 (Linear) failed with input [2, 5]"),
        ([MLP, "--input", "2,4", "--columns", "nope"], "unknown column 'nope'"),
        ([MLP, "--input", "2,4", "--units", "X"], "unknown unit prefix 'X'"),
        (
            [MLP, "--input", "2,4", "--format", "yaml"],
            "--format: it must be one of 'text', 'json', 'csv', 'markdown', 'latex', 'html', got 'yaml'",
        ),
        ([MLP, "--mode", "trian"], "got 'trian'; did you mean 'train'?"),
        ([MLP, "--input", "2,4", "--format", "csv", "--split", "2"], "--split needs --format text or json"),
        ([MLP, "--input", "2,4", "--split", "9"], "9"),
        ([MLP, "--input", "2,4", "--max-params", "many"], "expected a number such as 25M, 4.1G or 16GiB, got 'many'"),
        ([MLP, "--max-macs", "1"], "--max-macs needs an --input"),
        ([MLP, "--input", "2,4", "--output", "/nowhere/at/all"], "No such file or directory"),
        ([MLP, "--device", "nowhere"], "device must name a torch device, got 'nowhere'"),
        ([MLP, "--inp", "2,4"], "modelsummary [summarize] has no option --inp; did you mean '--input'"),
        (
            ["calibrat", "resnet18"],
            "unrecognized arguments: resnet18; 'calibrat' is not a command; did you mean 'calibrate'",
        ),
        (["explore", "--opne"], "modelsummary explore has no option --opne; did you mean '--open'"),
        (["compare", MLP, "--split=2"], "modelsummary compare has no option --split"),
        (["missing.pt2"], "file 'missing.pt2'"),
        (["tests"], "; tests is a folder"),
        (["README.md"], "; README.md is a file of another kind"),
        (["check", "weights.safetensors", "--input", "2,4"], "is a file, but this command runs a model; pass one that"),
        ([MLP, "--input", "2,4", "--split", "-2"], "argument --split: expected an integer >= 1, got '-2'"),
        ([MLP, "--depth", "-1"], "argument --depth: expected an integer >= 0, got '-1'"),
        (["torch.nn:Linear"], "and 'out_features'; --kwargs passes arguments, as JSON"),
        ([MLP, "--max-growth", "5%"], "pass its JSON, such as --diff before.json"),
        ([MLP, "--max-growth", "1.05"], "expected a percentage such as 5%, got '1.05'"),
        (["missing.onnx", "--values"], "'missing.onnx' is a file; leave out --values"),
        ([MLP, "--split", "2"], "--split needs an --input"),
        ([MLP, "--input", "2,4", "--max-memory", "16"], "it is in bytes, and '16' is 16 of them; pass text such as"),
        ([MLP, "--max-params", "1Pi"], "expected a number such as 25M, 4.1G or 16GiB, got '1Pi'"),
        ([MLP, "--input", "99999999999999999999,4"], "--debug shows the traceback"),
        (["tests.cli.test_commands:READY", "--kwargs", '{"width": 3}'], "is made already"),
        (["tests.broken_module:Net"], "cannot be imported"),
        (["hf:missing.json"], "org/name on the Hugging Face Hub, got 'missing.json'"),
    ],
)
def test_errors(capsys, arguments, message):
    if arguments[:1] == ["hf:missing.json"]:
        pytest.importorskip("transformers")
    said = output(capsys, *arguments, status=2)
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert message in said.err


def test_exact_amounts():
    assert parse_budget("4.1G") == 4_100_000_000
    assert parse_budget("1.005M") == 1_005_000
    assert parse_budget("16GiB") == 16 * 2**30


def test_debug():
    with pytest.raises(InputError, match="expected torchvision:NAME"):
        run(["mlp", "--debug"])


def test_missing_library(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install 'torch-modelsummary[timm]'" in output(capsys, "timm:vit", status=2).err
    with pytest.raises(MissingExtraError):
        run(["timm:vit", "--debug"])


def test_exported_program(capsys, tmp_path):
    program = torch.export.export(embedding(), (torch.tensor([1, 2]),), {"scale": torch.ones(3)})
    torch.export.save(program, tmp_path / "model.pt2")
    is_old = "serialized_exported_program.json" in zipfile.ZipFile(tmp_path / "model.pt2").namelist()  # torch 2.6
    found = output(capsys, str(tmp_path / "model.pt2"), "--format", "json", status=2 if is_old else 0)
    if is_old:
        assert "holds no exported program; save it again with torch >= 2.11" in found.err
    else:
        facts = json.loads(found.out)
        assert facts["rows"][0]["num_params"] == 30
        assert facts["rows"][0]["output_size"] == [2, 3]
    (tmp_path / "broken.pt2").write_bytes(b"nothing")
    for more, said in (([], "is not a torch archive"), (["--latency"], "cannot be read as an exported program")):
        assert said in output(capsys, str(tmp_path / "broken.pt2"), *more, status=2).err


def test_torchvision(capsys):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    facts = json.loads(output(capsys, "torchvision:resnet18", "--input", "1,3,224,224", "--format", "json").out)
    assert facts["rows"][0]["num_params"] == 11_689_512
    assert "no model 'resnet19'; did you mean 'resnet18'" in output(capsys, "torchvision:resnet19", status=2).err
    assert "Total params: 27,161,264" in output(capsys, "torchvision:inception_v3", "--depth", "0").out


def test_hugging_face(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    settings = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    name = f"hf:{tmp_path / 'config.json'}"
    facts = json.loads(output(capsys, name, "--input", "1,4", "--format", "json").out)
    assert facts["rows"][0]["class_name"] == "GPT2Model"
    # 20 * 8 + 16 * 8 embeddings; a block of 12 * 8 * 8 weights, 9 * 8 biases, 2 norms of 2 * 8; a norm
    assert facts["rows"][0]["num_params"] == 288 + 768 + 72 + 32 + 16
    (tmp_path / "config.json").write_text(json.dumps({**settings, "architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel" in output(capsys, name).out
    repositories = {("org/net", "config.json"): str(tmp_path / "config.json")}
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names: repositories[names])
    assert output(capsys, "hf:org/net").out == output(capsys, name).out
    said = output(capsys, "hf:org/lost", status=2).err
    assert "'hf:org/lost': it is not in the cache, and the Hugging Face Hub cannot be reached" in said
    (tmp_path / "config.json").write_text("{}")
    assert "has no 'model_type'" in output(capsys, name, status=2).err


def test_adapters(capsys, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    settings = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "architectures": ["GPT2LMHeadModel"]}))
    options = ["--input", "1,4", "--lora", "3", "--format", "json"]
    root = json.loads(output(capsys, f"hf:{tmp_path / 'config.json'}", *options).out)["rows"][0]
    # query, key and value; out; both layers of the MLP: 3 * (8 + 24 + 8 + 8 + 8 + 32 + 32 + 8)
    assert root["trainable_params"] == 3 * 128
    assert root["num_params"] == 288 + 768 + 72 + 32 + 16 + 3 * 128
    assert "--lora 3 does not fit ReLU" in output(capsys, "torch.nn:ReLU", "--lora", "3", status=2).err
    assert "'net.onnx' is a file; leave out --lora 3" in output(capsys, "net.onnx", "--lora", "3", status=2).err


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no names of open files")
def test_a_configuration_may_come_through_a_pipe(capsys):
    pytest.importorskip("transformers")
    reader, writer = os.pipe()
    with open(reader), open(writer, "w") as pipe:
        json.dump({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 10}, pipe)
        pipe.close()
        assert "GPT2Model" in output(capsys, f"hf:/dev/fd/{reader}", "--input", "1,4").out


@pytest.mark.parametrize(("settings", "size"), [({}, 4), ({"dtype": "bfloat16"}, 2)])
@pytest.mark.parametrize("architecture", [[], ["MixtralForCausalLM"]])
def test_a_configuration_says_the_dtype(capsys, tmp_path, settings, size, architecture):
    """A mixture of four experts, of which each token takes two, on shapes in every dtype."""
    pytest.importorskip("transformers", minversion="4.56")  # before, the key was torch_dtype
    own = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**own, **heads, **settings, "architectures": architecture}))
    root = json.loads(output(capsys, f"hf:{path}", "--input", "1,8", "--format", "json").out)["rows"][0]
    assert root["params_bytes"] == size * root["num_params"]
    # 8 tokens: q, k and v of half as many heads, out; scores and values; the gate; two experts of three matrices
    layer = 8 * 64 * (64 + 32 + 32 + 64) + 4 * 8 * 8 * 16 * 2 + 8 * 64 * 4 + 2 * 8 * 3 * 64 * 96
    assert root["macs"] == 2 * layer + (8 * 64 * 100 if architecture else 0)


def test_colour(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output(capsys, "mlp", status=2).err.startswith("\x1b[31merror:\x1b[0m ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert output(capsys, "mlp", status=2).err.startswith("error: ")


COMMANDS = ["summarize", "compare", "explore", "calibrate", "serve-plan", "plan"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(capsys, command):
    with pytest.raises(SystemExit):
        run([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: modelsummary ")
    assert "model and inputs:\n  MODEL" in said
    assert ("--latency" in said) == (command == "summarize")
    assert ("--mode {train,eval}" in said) == (command in ("summarize", "compare", "explore"))
    assert said.count("\nquestions:") == (command in ("summarize", "explore"))
    assert said.count("--input SIZE ") == 1
    for names in (CACHES, MODES) if command == "serve-plan" else ():
        assert all(name in said for name in names)


def test_the_default_command_may_be_named(capsys):
    assert output(capsys, "summarize", MLP, "--input", "2,4").out == output(capsys, MLP, "--input", "2,4").out
    with pytest.raises(SystemExit):
        run(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n    {command} " in said for command in COMMANDS)
    assert "--input SIZE" not in said


def test_help_and_errors_of_options_import_no_torch():
    commands = "[], ['--help'], ['net', '--inp', '3'], ['serve-plan', '--help'], ['serve-plan', 'net', '--mod', 'x']"
    code = f"""
import sys
from modelsummary.cli import run
for arguments in ({commands}, ['net', '--mode', 'trian'], ['net', '--split', 'two'], ['explore', '-h']):
    try:
        assert run(arguments) == 2
    except SystemExit as exit:
        assert exit.code == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("line", "prog"),
    [("modelsummary ", "modelsummary"), ("modelsummary expl", "modelsummary"), ("modelsummary net --inp", "summarize")],
)
def test_completion_of_what_is_typed(monkeypatch, capsys, line, prog):
    completed = []
    module = SimpleNamespace(autocomplete=lambda parser: completed.append(parser.prog))
    monkeypatch.setitem(sys.modules, "argcomplete", module)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", line)
    output(capsys, status=2)
    assert completed == [{"summarize": "modelsummary [summarize]"}.get(prog, prog)]


def test_the_process():
    command = f"{sys.executable} -m modelsummary"
    said = subprocess.run(f"{command} {MLP} --max-params 1", shell=True, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "exceeded: 58 params" in said.stderr
    cut = subprocess.run(f"{command} --help | head -1", shell=True, capture_output=True, text=True, check=True)
    assert cut.stdout.startswith("usage: modelsummary")
    assert cut.stderr == ""


def test_explore_writes_a_page(capsys, tmp_path):
    page = tmp_path / "net.html"
    arguments = ["torch.nn:Linear", "--kwargs", '{"in_features": 2, "out_features": 3}', "--input", "1,2"]
    assert run(["explore", *arguments, "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"written: {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    exported = tmp_path / "net.json"
    assert run([*arguments, "--format", "json", "--output", str(exported)]) == 0
    assert run(["explore", str(exported), "--compare", str(exported), "--output", str(page)]) == 0


def test_the_environment_of_a_report(capsys):
    assert run(["env", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["torch"], facts["Python"]) == (torch.__version__, platform.python_version())
    assert run(["env"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{name}: {value}" for name, value in facts.items()]


def test_a_plan_for_a_cluster(capsys):
    arguments = ["--device", "A100", "--per-node", "2", "--batch", "8", "--limit", "2"]
    text = output(capsys, "plan", MLP, "--input", "1,4", *arguments).out
    assert text.startswith("Plans for a training step of Sequential, bfloat16, compiled kernels, adamw")
    records = json.loads(output(capsys, "plan", MLP, "--input", "1,4", *arguments, "--format", "json").out)
    assert {record["devices"] for record in records} == {2}
    assert "plan needs an --input" in output(capsys, "plan", MLP, *arguments, status=2).err
    missing = output(capsys, "plan", MLP, "--input", "1,4", "--device", "A100", "--batch", "8k", status=2).err
    assert "--batch: expected an integer such as 2 or 8192, got '8k'; did you mean 8000?" in missing


def test_weights_are_not_told_to_take_an_input(capsys, tmp_path):
    torch.save(mlp().state_dict(), tmp_path / "mlp.pth")
    said = output(capsys, str(tmp_path / "mlp.pth"), "--max-macs", "1k", status=2).err
    assert said == "error: --max-macs needs a forward, and weights have none\n"
