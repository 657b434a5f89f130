"""The work of operators; every expected number is derived by hand."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from modelsummary import Statistics, cluster, register_op_cost
from modelsummary.operators.operator_calls import OperatorLog
from modelsummary.operators.operator_rules import op_rule
from modelsummary.operators.operator_work import work_of

aten = torch.ops.aten


def call(func, *args, **kwargs):
    log = OperatorLog(id, set())
    log.note(func, args, kwargs, func(*args, **kwargs))
    return log.runs[0].call


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype)


def facts(work):
    return work.op_class, work.sizes, work.flops, work.nbytes


def test_product():
    (work,) = work_of(call(aten.addmm.default, meta(5), meta(3, 4), meta(4, 5)))
    # 2 x 3 x 5 x 4 FLOPs; reads 5 + 12 + 20 floats, writes 15
    assert facts(work) == ("gemm", (1, 3, 5, 4), 120, 4 * 52)
    (work,) = work_of(call(aten.bmm.default, meta(2, 3, 4), meta(2, 4, 5)))
    assert work.sizes == (2, 3, 5, 4)


def test_convolution():
    arguments = (meta(2, 6, 8, 8), meta(10, 6, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    (work,) = work_of(call(aten.convolution.default, *arguments))
    # 2 x 64 positions x 10 channels x 54 products each; reads 768 + 540 floats, writes 1,280
    assert work.is_3x3
    assert work.name == "aten.convolution (3x3)"
    assert facts(work) == ("conv", (1, 128, 10, 54, 8, 8), 2 * 128 * 10 * 54, 4 * (768 + 540 + 1280))
    arguments = (meta(2, 6, 8, 8), meta(6, 1, 3, 3), meta(6), [2, 2], [1, 1], [1, 1], False, [0, 0], 6)
    work, bias = work_of(call(aten.convolution.default, *arguments))
    assert facts(work)[:3] == ("depthwise", (2 * 6 * 16, 9), 2 * 192 * 9)
    assert (bias.op_class, bias.nbytes) == ("elementwise", 2 * 4 * 192)


def test_backward_of_a_convolution():
    grad, x, weight = meta(2, 10, 8, 8), meta(2, 6, 8, 8), meta(10, 6, 3, 3)
    arguments = (grad, x, weight, [10], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    of_input, of_weight, of_bias = work_of(call(aten.convolution_backward.default, *arguments))
    assert of_input.sizes[:4] == (1, 128, 6, 90)
    assert of_weight.sizes[:4] == (1, 10, 54, 128)
    assert of_input.flops == of_weight.flops == 2 * 128 * 10 * 54
    assert of_bias.op_class == "reduction"


def test_batch_norm_in_training_reads_its_input_twice():
    x, one = meta(2, 3, 4, 4), meta(3)
    (inference,) = work_of(call(aten.native_batch_norm.default, x, one, one, one, one, False, 0.1, 1e-5))
    (training,) = work_of(call(aten.native_batch_norm.default, x, one, one, one, one, True, 0.1, 1e-5))
    assert inference.name.endswith("(inference)")
    assert training.nbytes - inference.nbytes >= 96 * 4


@pytest.mark.parametrize(
    ("func", "arguments", "op_class"),
    [
        (aten.relu.default, (meta(4, 8),), "elementwise"),
        (aten.gelu_backward.default, (meta(4, 8), meta(4, 8)), "elementwise"),
        (aten._to_copy.default, (meta(4, 8),), "copy"),
        (aten._softmax.default, (meta(4, 8), -1, False), "softmax"),
        (aten.native_layer_norm.default, (meta(4, 8), [8], None, None, 1e-5), "norm"),
        (aten.mean.dim, (meta(4, 8), [1]), "reduction"),
        (aten.avg_pool2d.default, (meta(1, 2, 8, 8), [2, 2]), "pool"),
        (aten.embedding.default, (meta(9, 8), meta(4, dtype=torch.long)), "index"),
    ],
)
def test_classes(func, arguments, op_class):
    (work,) = work_of(call(func, *arguments))
    assert work.op_class == op_class


@pytest.mark.parametrize(
    ("func", "arguments"),
    [  # what stands between value and is_causal differs
        (aten._scaled_dot_product_flash_attention.default, (0.0,)),
        (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.0)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True, 0.0)),
    ],
)
def test_each_fused_attention_says_whether_it_is_causal(func, arguments):
    tensors = [meta(2, 4, 16, 8, dtype=torch.float16) for _ in range(3)]
    for is_causal in (False, True):
        (work,) = work_of(call(func, *tensors, *arguments, is_causal))
        assert work.sizes == (8, 16, 16, 8)
        assert work.is_causal == is_causal
        assert work.is_efficient == ("efficient" in str(func))


def test_views_and_allocations_are_no_kernels():
    assert work_of(call(aten.t.default, meta(4, 8))) == ()
    assert work_of(call(aten.empty_like.default, meta(4, 8))) == ()


def test_equal_calls_are_one_object_with_a_stable_key():
    tensors = (meta(4, 8), meta(4, 8), meta(8, 4).t())
    log = OperatorLog(id, set(map(id, tensors)))
    for x in tensors:
        log.note(aten.relu.default, (x,), {}, x)
    first, second, turned = (run.call for run in log.runs)
    assert first is second
    assert first.key == "aten.relu.default(f32[4x8]p)"
    assert turned.key == "aten.relu.default(f32[4x8/1x4]p)"


def test_nodes_of_a_backward_in_another_thread():
    """Autograd numbers the nodes of each thread by themselves; a backward on CUDA runs in a thread of its own."""
    x = torch.ones(2, requires_grad=True)
    x.sin().cos()  # the numbers of this thread are beyond those of a new one
    log = OperatorLog(id, set())

    def note():
        log.note(aten.relu.default, (x,), {}, x)

    x.sin()
    note()
    backward = Thread(target=note)
    backward.start()
    backward.join()
    note()
    assert [run.nodes for run in log.runs] == [1, 0, 0]


def overloads():
    """Every operator of torch and torchvision that a mode may see: not composite, without ``out=``."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        func = getattr(packet, overload or "default", None)
        is_test = "_test_" in base or base == "_foobar"
        if (
            namespace in ("aten", "torchvision", "quantized")
            and func is not None
            and "out" not in overload
            and not is_test
        ):
            rule = op_rule(func)
            if not rule.is_composite and not base.endswith("_out"):
                yield rule


# Their work depends on an algorithm or on values; or another device runs them.
UNKNOWN = (
    "_fft_ linalg_ cholesky_ geqrf ormqr _spsolve _compute_linear_combination mps _triton_ sparse_mm _sparse_semi"
    " _sparse_sparse _cudnn_attention no_dropout_inplace rnn_backward quantized_ mkldnn_linear_backward matmul_backward"
    " _slow_conv2d_backward _nnpack_ _foreach_mm linear_dynamic_fp16_unpacked linear_with_input_q_dq"
).split()


def test_every_operator_has_a_kernel_or_is_known_to_have_none():
    rules = list(overloads())
    assert len(rules) > 1500
    unknown = {
        rule.name for rule in rules if rule.launches_kernel and rule.facts.macs is None and rule.op_class == "other"
    }
    assert sorted(name for name in unknown if not any(part in name for part in UNKNOWN)) == []


def test_operators_without_a_kernel_are_told_by_their_schemas():
    assert not op_rule(aten.t_.default).launches_kernel
    assert not op_rule(aten.split.Tensor).launches_kernel
    assert not op_rule(aten.resize_.default).launches_kernel
    assert not op_rule(aten.sym_size.int).launches_kernel
    assert not op_rule(torch.ops.profiler._record_function_enter_new.default).launches_kernel
    assert op_rule(aten.equal.default).launches_kernel  # reads both tensors
    assert op_rule(aten._foreach_add_.List).launches_kernel
    with torch.library._scoped_library("told_by_schema", "DEF") as library:
        library.define("view(Tensor(a) x) -> Tensor(a)")
        library.define("new(Tensor x) -> Tensor")
        library.define("write(Tensor(a!) x) -> ()")
        library.define("look(Tensor x) -> int")
        ops = torch.ops.told_by_schema
        assert not op_rule(ops.view.default).launches_kernel
        assert all(op_rule(op.default).launches_kernel for op in (ops.new, ops.write, ops.look))


@pytest.fixture(scope="module")
def product():
    """An operator of another library with a formula, and one without."""
    with torch.library._scoped_library("foreign", "FRAGMENT") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.define("int8_rowwise_quant(Tensor a) -> Tensor")
        library.define("mystery(Tensor(a!) a, Tensor b) -> ()")
        library.impl("product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "CompositeExplicitAutograd")
        library.impl("mystery", lambda _a, _b: None, "CompositeExplicitAutograd")
        library.impl("int8_rowwise_quant", lambda a: a.to(torch.int8), "CompositeExplicitAutograd")
        register_op_cost(torch.ops.foreign.product)(lambda a, b, out: a.numel() * b.shape[1])
        yield torch.ops.foreign


def test_operators_of_other_libraries_take_the_time_of_their_multiply_adds_and_bytes(product):
    (work,) = work_of(call(product.product.default, meta(8, 16), meta(16, 4)))
    assert facts(work) == ("gemm", (1, 8, 4, 16), 2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))
    (work,) = work_of(call(product.int8_rowwise_quant.default, meta(8)))
    assert facts(work) == ("elementwise", (8,), 0, 4 * 8 + 8)
    # reads 8 + 8 floats and writes 8, though it returns nothing
    (work,) = work_of(call(product.mystery.default, meta(8), meta(8)))
    assert facts(work) == ("other", (8,), 0, 4 * 3 * 8)


def test_convolutions_of_every_library_are_convolutions():
    x, weight, one = meta(2, 6, 8, 8), meta(10, 6, 3, 3), [1, 1]
    same = ("conv", (1, 128, 10, 54, 8, 8), 2 * 128 * 10 * 54, 4 * (768 + 540 + 1280))
    for func, arguments in (
        (aten.mkldnn_convolution.default, (None, one, one, one, 1)),
        (aten.cudnn_convolution.default, (one, one, one, 1, True, False, True)),  # (..., groups, benchmark, ...)
        (aten.miopen_convolution.default, (None, one, one, one, 1, True, False)),
        (aten._slow_conv2d_forward.default, ([3, 3], None, one, one)),
        (aten.slow_conv_dilated2d.default, ([3, 3], None, one, one, one)),
    ):
        log = OperatorLog(id, set())
        log.note(func, (x, weight, *arguments), {}, meta(2, 10, 8, 8))
        (work,) = work_of(log.runs[0].call)
        assert facts(work) == same, func
        assert work.is_3x3 or "slow" in work.operator
    log.note(aten._conv_depthwise2d.default, (x, meta(6, 1, 3, 3), [3, 3], None, one, one, one), {}, x)
    (work,) = work_of(log.runs[-1].call)
    assert facts(work)[:3] == ("depthwise", (768, 9), 2 * 768 * 9)


def test_integer_products_compute_with_integers():
    (work,) = work_of(call(aten._int_mm.default, meta(32, 16, dtype=torch.int8), meta(16, 8, dtype=torch.int8)))
    assert (work.op_class, work.sizes, work.dtype) == ("gemm", (1, 32, 8, 16), torch.int8)


def test_products_of_sparse_matrices_are_products():
    matrix = torch.eye(8).to_sparse_coo()  # 8 elements
    log = OperatorLog(id, set())
    log.note(aten.mm.default, (matrix, torch.ones(8, 4)), {}, torch.ones(8, 4))
    (work,) = work_of(log.runs[0].call)
    assert (work.op_class, work.flops) == ("gemm", 2 * 8 * 4)


@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning", "ignore:.*deprecated.*:DeprecationWarning")
def test_packed_weights_of_other_sizes_are_other_calls():
    log = OperatorLog(id, set())
    for k in (4, 8):
        weight = torch.quantize_per_tensor(torch.rand(6, k), 0.1, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(weight, None)
        log.note(torch.ops.quantized.linear_dynamic.default, (torch.rand(2, k), packed), {}, torch.rand(2, 6))
    assert [work_of(run.call)[0].flops for run in log.runs] == [2 * 2 * 6 * 4, 2 * 2 * 6 * 8]
    log = OperatorLog(id, set())
    for out in (meta(2, 6), meta(2, 6)):
        log.note(aten.relu.default, (out,), {}, out)
    assert log.runs[0].call is log.runs[1].call


class Flex(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        return flex.flex_attention(x, x, x, block_mask=self.mask)


def test_flex_attention_is_a_kernel_without_the_blocks_that_its_mask_excludes():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 256, 256, device="cpu")
    for block_mask, part in ((None, 1.0), (mask, 0.75)):  # of 2 x 2 blocks of 128, one is excluded
        stats = Statistics(Flex(block_mask), (torch.rand(2, 4, 256, 16),))
        (kernel,) = [each for each in stats.kernels("A100") if each.op_class == "attention"]
        assert kernel.sizes == (8, 256, 256, 16)
        assert kernel.flops == part * 2 * 2 * 8 * 256 * 256 * 16 == 2 * (stats.root.macs - stats.root.skipped_macs)


@torch.library.custom_op("modelsummary_tests::product", mutates_args=())
def own_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


own_product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
own_product.register_autograd(
    lambda context, gradient: (None, own_product(context.input.t(), gradient)),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "input", inputs[0]),
)


class Multiplied(torch.nn.Module):
    def __init__(self, is_custom):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(512, 256))
        self.is_custom = is_custom

    def forward(self, x):
        return own_product(x, self.weight) if self.is_custom else x.mm(self.weight)


def test_a_custom_operator_with_a_formula_takes_the_time_of_its_equal_in_every_answer():
    register_op_cost(torch.ops.modelsummary_tests.product)(lambda a, b, out: a.numel() * b.shape[1])
    answers = []
    for is_custom in (True, False):
        stats = Statistics(Multiplied(is_custom), (torch.rand(64, 512),))
        (kernel,) = stats.kernels("A100")
        # 2 x 64 x 512 x 256 FLOPs; reads 64 x 512 and 512 x 256 floats, writes 64 x 256
        assert facts(kernel.work) == ("gemm", (1, 64, 256, 512), 16_777_216, 4 * (32_768 + 131_072 + 16_384))
        latency = stats.estimate_latency("A100", backward=True)
        assert not latency.uncounted_ops
        step = stats.simulate(cluster.Plan(micro_batch=64), cluster.Cluster("A100"), global_batch=64)
        # the gradient of the weight is a product of equally many multiply-adds
        assert (stats.root.macs, step.model_flops, step.uncounted_ops) == (8_388_608, 2 * 16_777_216, {})
        answers.append((kernel.seconds, latency.forward_ms, latency.backward_ms, step.seconds_by_cause))
    assert answers[0] == answers[1]


class Attention(torch.nn.Module):
    def __init__(self, is_flex):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(64))
        self.is_flex = is_flex

    def forward(self, x):
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        attention = flex.flex_attention if self.is_flex else torch.nn.functional.scaled_dot_product_attention
        scaled = x * self.scale
        return attention(scaled, scaled, scaled)


def test_flex_attention_takes_the_time_of_attention_without_a_mask_in_every_answer():
    seconds = []
    for is_flex in (True, False):
        stats = Statistics(Attention(is_flex).to(torch.bfloat16), (torch.rand(4, 16, 1024, 64).to(torch.bfloat16),))
        (kernel,) = [kernel for kernel in stats.kernels("A100") if kernel.op_class == "attention"]
        # scores and weighted values: 2 x 2 x 64 heads x 1,024 queries x 1,024 keys x 64
        assert (kernel.sizes, kernel.flops) == ((64, 1024, 1024, 64), 17_179_869_184)
        backward_ms = stats.estimate_latency("A100", backward=True).backward_ms
        step = stats.simulate(cluster.Plan(micro_batch=4), cluster.Cluster("A100"), global_batch=4)
        # the backward: gradients of query, key, value and weights, two of these products each
        assert step.model_flops == 3 * 17_179_869_184
        seconds.append((kernel.seconds, backward_ms, step.seconds_by_cause["optimizer"]))
    # of a default block mask of one block, flex_attention reads a few numbers
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-4)


def test_batch_norm_in_channels_last_reads_its_input_once():
    x, one = torch.empty(2, 3, 4, 4, device="meta", memory_format=torch.channels_last), meta(3)
    (training,) = work_of(call(aten.native_batch_norm.default, x, one, one, one, one, True, 0.1, 1e-5))
    assert training.name == "aten.native_batch_norm (channels last)"
    assert training.nbytes == 4 * (96 + 96 + 3 + 2 * 3)  # input, result, the one tensor of parameters, two statistics


def test_half_precision_convolutions_pad_images_with_few_channels():
    for dtype, channels in ((torch.float32, 3), (torch.float16, 8)):
        arguments = (meta(2, 3, 8, 8, dtype=dtype), meta(10, 3, 3, 3, dtype=dtype), None)
        (work,) = work_of(call(aten.convolution.default, *arguments, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
        assert work.sizes == (1, 128, 10, channels * 9, 8, 8)
        assert work.flops == 2 * 128 * 10 * 27


def test_a_copy_says_how_it_loads_elements():
    x = meta(4, 8, 6)
    turned, strided = x.transpose(1, 2), x.transpose(0, 1)  # another dimension becomes innermost, or none does
    parts = ((x, ""), (x[:, :4], ""), (turned, "transposed"), (strided, "strided"), (x[:1].expand(4, 8, 6), ""))
    for source, part in parts:
        (work,) = work_of(call(aten.clone.default, source, memory_format=torch.contiguous_format))
        assert (work.op_class, work.part) == ("copy", part)
    (work,) = work_of(call(aten.fill_.Tensor, x, meta()))
    assert work.part == ""
    half = meta(4, 8, dtype=torch.bfloat16)
    for source, dtype, part in ((half, torch.float32, "element by element"), (meta(4, 8), torch.bfloat16, "")):
        (work,) = work_of(call(aten._to_copy.default, source, dtype=dtype))
        assert work.part == part
    assert work_of(call(aten.cat.default, [half, half]))[0].part == "element by element"


def test_elementwise_operators_load_tensors_that_differ_element_by_element():
    x, row, half = meta(4, 8), meta(8), meta(4, 8, dtype=torch.bfloat16)
    for other in (row, half, x.t().contiguous().t()):
        assert work_of(call(aten.mul.Tensor, x, other))[0].part == "element by element"
    assert work_of(call(aten.mul.Tensor, x, x))[0].part == ""
    (work,) = work_of(call(aten._foreach_add.List, [x, row], [x, row]))
    assert work.name == "aten._foreach_add"  # each tensor is added to one of its shape
    assert work_of(call(aten.mul.Tensor, x, meta()))[0].part == ""  # one number for all


def test_reductions_over_rows_say_so():
    x = meta(4, 8)
    for dims, part in (([0], "over rows"), ([1], ""), ([0, 1], "")):
        assert work_of(call(aten.sum.dim_IntList, x, dims))[0].part == part


def test_products_say_of_which_bytes_their_rows_begin_at_multiples():
    def alignment(m, n, k, dtype=torch.bfloat16):
        return work_of(call(aten.mm.default, meta(m, k, dtype=dtype), meta(n, k, dtype=dtype).t()))[0].alignment

    assert [alignment(64, n, 64) for n in (64, 65, 66, 68, 72)] == [16, 2, 4, 8, 16]
    assert [alignment(64, 64, k) for k in (64, 65, 66)] == [16, 2, 4]
    assert alignment(65, 64, 64) == 16  # rows of the result, however many, begin at multiples
    assert alignment(64, 65, 64, torch.float32) == 4
    expanded = meta(dtype=torch.bfloat16).expand(64, 66)  # as the gradient of a sum; torch copies it for the product
    assert work_of(call(aten.mm.default, expanded, meta(66, 64, dtype=torch.bfloat16)))[0].alignment == 4
    x, weight = meta(2, 64, 64, dtype=torch.bfloat16), meta(66, 64, dtype=torch.bfloat16)
    with torch.inference_mode():  # torch does not decompose it
        assert work_of(call(aten.linear.default, x, weight))[0].alignment == 4


def test_convolutions_of_single_pixels_are_products_of_images_as_they_are():
    def alignment(side, kernel=1, dtype=torch.bfloat16, memory_format=torch.contiguous_format):
        x = meta(2, 8, side, side, dtype=dtype).to(memory_format=memory_format)
        weight = meta(16, 8, kernel, kernel, dtype=dtype)
        padding = [kernel // 2] * 2
        (work,) = work_of(call(aten.convolution.default, x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1))
        return work.alignment

    assert alignment(8) == 16
    assert alignment(14) == 8  # 196 elements
    assert alignment(7) == 16  # 49 elements are odd, so the images are converted
    assert alignment(14, kernel=3) == 16
    assert alignment(14, memory_format=torch.channels_last) == 16


def test_a_backward_of_attention_converts_the_sums_of_its_queries():
    q = meta(2, 4, 16, 8, dtype=torch.bfloat16)
    lse = meta(2, 4, 16)
    arguments = (q, q, q, q, q, lse, None, None, 16, 16, 0.0, False, meta(2), meta(2))
    _, sums = work_of(call(aten._scaled_dot_product_flash_attention_backward.default, *arguments))
    # float32 is filled, added to and read; bfloat16 written
    assert (sums.op_class, sums.nbytes) == ("copy", 2 * 4 * 16 * 8 * (3 * 4 + 2))


def test_softmax_multiplies_gradients_in_a_kernel_of_its_own():
    """``grad * output`` before the kernel, in aten/src/ATen/native/cuda/SoftMax.cu."""
    x = meta(8, 16)
    product, softmax = work_of(call(aten._softmax_backward_data.default, x, x, -1, torch.float32))
    assert (product.op_class, product.nbytes, softmax.op_class, softmax.nbytes) == (
        "elementwise",
        1536,
        "softmax",
        1536,
    )
    (log_softmax,) = work_of(call(aten._log_softmax_backward_data.default, x, meta(8, 16), -1, torch.float32))
    assert log_softmax.nbytes == 1536


def test_pooling_computes_the_elements_that_it_writes():
    x = meta(2, 4, 8, 8)
    (forward,) = work_of(call(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2]))
    assert (forward.part, forward.sizes, forward.channels_last) == ("maximum", (2 * 4 * 16,), False)
    (average,) = work_of(
        call(aten.avg_pool2d_backward.default, meta(2, 4, 4, 4), x, [2, 2], [2, 2], [0, 0], False, True, None)
    )
    assert (average.part, average.sizes) == ("average backward", (2 * 4 * 64,))
