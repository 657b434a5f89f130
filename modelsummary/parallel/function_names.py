"""Names of torch functions by what they do to shards."""

from __future__ import annotations

__all__ = ["Families"]


class Families:
    """Names of functions in families of one rule. ``to_code`` copies the class for ``ExpertShards``."""

    ELEMENTWISE = frozenset(
        """
        abs add sub rsub mul div true_divide floor_divide neg pow square sqrt rsqrt exp expm1 log log1p log2 sin cos tan
        tanh sigmoid erf reciprocal sign ceil floor round trunc clamp clamp_min clamp_max minimum maximum fmod remainder
        where masked_fill eq ne lt le gt ge logical_and logical_or logical_not and or xor invert bitwise_and bitwise_or
        bitwise_not isnan isinf isfinite nan_to_num relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh
        hardswish hardsigmoid softplus softsign logsigmoid threshold dropout feature_dropout alpha_dropout lerp addcmul
        addcdiv to type type_as float half bfloat16 double long int bool contiguous clone detach requires_grad
        float_power atan2 iadd isub imul itruediv idiv radd rmul rtruediv truediv rpow ipow xlogy rdiv real imag conj
        positive data fill zero tanhshrink softshrink hardshrink glu_jvp copysign hypot logit sinc sinh cosh asin acos
        atan relu_ identity multiply subtract divide negative clip copy
        """.split()
    )
    # Of the elementwise functions, these are linear in one tensor, and these add two.
    LINEAR = frozenset(
        "neg negative positive contiguous clone detach data to type type_as float half bfloat16 double".split()
    )
    TERMS = frozenset("add sub rsub iadd isub radd subtract".split())
    # These move, add or remove dimensions, change their sizes, or repeat dimensions of one element.
    MOVES = frozenset(
        "permute transpose t T mT H mH movedim moveaxis swapaxes swapdims adjoint unsqueeze squeeze".split()
    )
    RESHAPES = frozenset("view reshape flatten unflatten view_as reshape_as ravel".split())
    EXPANDS = frozenset("expand expand_as broadcast_to".split())
    # These take or repeat elements along a dimension, by constants or by tensors of numbers.
    TAKES = frozenset(
        "chunk split split_with_sizes tensor_split unbind select narrow repeat_interleave flip roll repeat tile".split()
    )
    LOOKUPS = frozenset("index_select gather take_along_dim".split())
    VIEWS = MOVES | RESHAPES | EXPANDS | TAKES | LOOKUPS | frozenset({"getitem"})
    # These make one element of all along some dimensions, or as many as they take.
    REDUCES = frozenset(
        "sum mean amax amin max min var std prod logsumexp norm argmax argmin any all median count_nonzero".split()
    )
    ALONG = frozenset(
        """
        softmax log_softmax softmin cumsum cumprod logcumsumexp sort argsort topk normalize glu layer_norm rms_norm
        """.split()
    )
    JOINS = frozenset("cat concat concatenate stack vstack hstack".split())
    GROUPED = frozenset("grouped_mm grouped_mm_fallback".split())
    PRODUCTS = GROUPED | frozenset("linear matmul bmm mm addmm baddbmm einsum".split())
    # Each element is the same: a local tensor of fewer elements is a shard.
    FACTORIES = frozenset(
        "zeros ones full empty new_zeros new_ones new_empty new_full zeros_like ones_like full_like".split()
    )
    # Elements follow from their positions and the numbers that these take.
    NUMBERING = frozenset("arange range linspace eye tril_indices triu_indices".split())
    # Integers that these take are sizes, on which the shape of the result depends.
    SIZED = frozenset(
        """
        view reshape flatten unflatten expand broadcast_to repeat repeat_interleave tile split split_with_sizes
        tensor_split getitem setitem narrow select zeros ones empty rand randn new_zeros new_ones new_empty full
        new_full pad layer_norm rms_norm native_layer_norm as_strided unfold interpolate
        """.split()
    )
    # These draw random numbers.
    RANDOM = frozenset(
        """
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rrelu gumbel_softmax
        bernoulli multinomial normal uniform exponential rand randn randint randperm rand_like randn_like randint_like
        """.split()
    )
