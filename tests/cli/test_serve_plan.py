"""``modelsummary serve-plan``: from a configuration file to memory and times; its errors in one line."""

from __future__ import annotations

import json

import pytest

from modelsummary.cli.commands import run

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# Words and head; in each of 2 layers queries and output, keys and values, an MLP of three matrices, two norms; a norm.
PARAMETERS = 2 * 50 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
PER_TOKEN = 2 * 2 * 2 * 8  # keys and values of 2 heads of 8 elements in 2 layers


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pytest.importorskip("transformers", minversion="4.56")
    folder = tmp_path_factory.mktemp("model")
    facts = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SIZES, **HEADS}
    (folder / "config.json").write_text(json.dumps(facts))
    # The first model imports torchao, whose import writes warnings to stderr: they are not the command's.
    assert run(["serve-plan", f"hf:{folder}", "--device", "A100", "--context", "64"]) == 0
    return folder


def plan(capsys, name, *arguments, status=0):
    assert run(["serve-plan", name, "--device", "A100", "--context", "64", *arguments]) == status
    return capsys.readouterr()


def test_figures(capsys, config):
    found = json.loads(plan(capsys, f"hf:{config}", "--batch", "3", "--format", "json").out)
    assert (found["dtype"], found["context"], found["batch"]) == ("bfloat16", 64, 3)
    assert found["cache_bytes_per_token"] == 2 * PER_TOKEN
    assert found["cache_bytes"] == 64 * 2 * PER_TOKEN
    # the frequencies of the rotary embedding are buffers in float32 or bfloat16
    assert 2 * PARAMETERS < found["weight_bytes"] <= 2 * PARAMETERS + 4 * 8
    assert found["fits"]


def test_text_file_and_picture(capsys, config, tmp_path):
    pytest.importorskip("matplotlib")
    name = f"hf:{config / 'config.json'}"
    text, picture = tmp_path / "plan.txt", tmp_path / "plan.svg"
    options = ["--dtype", "float32", "--cache", "static", "--memory", "1MB", "--mode", "eager"]
    assert plan(capsys, name, *options, "--output", str(text), "--plot", str(picture)).out == ""
    lines = text.read_text().splitlines()
    assert lines[0].startswith("Serving LlamaForCausalLM, float32, eager on ")
    assert any(line.startswith("Cache per request") and "2 x StaticLayer" in line for line in lines)
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("quantization", "bits", "label"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "int4, groups of 128"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, 4.25, "MXFP4"),
    ],
)
def test_weights_as_the_checkpoint_keeps_them(capsys, config, tmp_path, quantization, bits, label):
    facts = json.loads((config / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**facts, "quantization_config": quantization}))
    (whole, found) = (json.loads(plan(capsys, f"hf:{of}", "--format", "json").out) for of in (config, tmp_path))
    products = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # words and head stay as they are
    assert whole["weight_bytes"] - found["weight_bytes"] == pytest.approx(products * (16 - bits) / 8, abs=1)
    assert label in plan(capsys, f"hf:{tmp_path}").out
    assert json.loads(plan(capsys, f"hf:{tmp_path}", "--weights", "int8", "--format", "json").out)["weights"] == "int8"


def test_a_form_of_weights_that_is_unknown(capsys, config, tmp_path):
    facts = json.loads((config / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**facts, "quantization_config": {"quant_method": "aqlm"}}))
    said = plan(capsys, f"hf:{tmp_path}", status=2).err
    assert "quant_method='aqlm' names none of the forms fp8, int8, int4, mxfp4, nvfp4" in said
    assert said.count("\n") == 1


def test_a_server_under_load(capsys, config):
    load = ["--prompt", "10:20", "--new-tokens", "5", "--requests", "20", "--max-requests", "8", "--token-budget", "64"]
    text = plan(capsys, f"hf:{config}", *load, "--rate", "50", "--weights", "int4").out
    assert "int4, groups of 128" in text
    assert "LlamaForCausalLM on A100 80GB: 20 requests in " in text


def test_a_plan_keeps_the_options_that_are_passed(capsys, config):
    load = ["--prompt", "10:20", "--new-tokens", "5", "--requests", "20", "--max-requests", "8", "--token-budget", "64"]
    load += ["--tensor", "2", "--ttft", "1000", "--price", "3", "--cache-dtype", "e4m3", "--format", "json"]
    (best,) = json.loads(plan(capsys, f"hf:{config}", *load).out)["load"]
    assert (best["tensor"], best["replicas"], best["max_requests"], best["token_budget"]) == (2, 4, 8, 64)
    assert best["cache_dtype"] == "float8_e4m3fn"
    assert best["requests_per_price"] == pytest.approx(3600 * best["requests_per_second"] / (8 * 3.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1"], "context must be an integer >= 2, got 1"),
        (["--batch", "0"], "argument --batch: expected an integer >= 1, got '0'"),
        (["--device", "A1000"], "'A1000'"),
        (["--device", "cpu"], "was never calibrated"),
        (["--dtype", "int8"], "it must be a floating point torch.dtype, or its name such as 'bfloat16', got 'int8'"),
        (["--memory", "3KB"], "pass tensor="),
        (["--memory", "3 apples"], "memory_bytes"),
        (["--tensor", "3"], "3"),
        (["--weights", "fp8"], "needs products of torch.float8_e4m3fn, which A100 80GB does not have"),
        (["--ttft", "50"], "a load needs --prompt and --new-tokens, such as --prompt 300"),
        (["--devices", "4"], "a load needs --prompt and --new-tokens, such as --prompt 300"),
        (
            ["--prompt", "9", "--new-tokens", "5", "--price", "2"],
            "--price are for a plan, which needs --ttft or --tpot",
        ),
        (["--prompt", "1:2:3"], "expected a number of tokens, or LEAST:MOST such as 100:500, got '1:2:3'"),
        (["--cache", "huge"], "--cache: it must be one of 'dynamic', 'static', 'fp8', 'quanto', got 'huge'"),
        (["--mode", "egaer"], "--mode: it must be one of 'eager', 'compiled', got 'egaer'; did you mean 'eager'?"),
    ],
)
def test_errors(capsys, config, arguments, message):
    said = plan(capsys, f"hf:{config}", *arguments, status=2)
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert message in said.err


def test_models_that_cannot_be_served(capsys):
    assert "serve-plan needs an --input of 'torch.nn:Flatten'" in plan(capsys, "torch.nn:Flatten", status=2).err
    said = plan(capsys, "torch.nn:Flatten", "--input", "input=1,4", status=2).err
    assert "serving needs an input of tokens" in said
    said = plan(capsys, "torch.nn:Flatten", "--input", "input=1,4:long", status=2).err
    assert "Flatten returns no cache that it takes back" in said


def test_mistakes_are_said_in_one_line(capsys, config, tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    (tmp_path / "net.py").write_text("from torch import nn\ndef build(): return nn.Sequential(nn.Linear(4, 8))\n")
    for name, more, said in (
        (f"hf:{tmp_path}", (), "has no 'model_type'; pass a config.json of transformers"),
        (f"{tmp_path}/net.py:build", ("--input", "1,4"), "serve-plan needs the name of each --input of this model"),
        (f"hf:{config}", ("--plot", str(tmp_path / "plot.abc")), "cannot be written: Format 'abc' is not supported"),
    ):
        errors = [line for line in plan(capsys, name, *more, status=2).err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert said in errors[0]
        assert "Error: " not in errors[0]
