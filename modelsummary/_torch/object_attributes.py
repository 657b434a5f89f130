"""The private attributes of torch's objects that other modules read in place, by the class that has them.

Each is read where the object is at hand, often in the innermost loop of a run, so that a function per attribute would
cost time and say nothing. Everything else private is behind a name of this package.
"""

from __future__ import annotations

__all__ = ["ATTRIBUTES", "OPERATORS"]

# Path of a class -> its attributes. Instances alone have some of them; torch 2.6 to 2.14 have all.
ATTRIBUTES: dict[str, str] = {
    # The dictionaries that a module is made of; pickled modules hold them, so torch cannot rename them.
    "torch.nn.Module": "_modules _parameters _buffers _non_persistent_buffers_set _forward_hooks _forward_pre_hooks"
    " _backward_hooks _backward_pre_hooks _apply",
    # The list of weights that a recurrent layer passes to its operator, beside its parameters.
    "torch.nn.LSTM": "_flat_weights _flat_weights_names",
    # The padding of another mode than zeros, in the form of ``F.pad``.
    "torch.nn.Conv2d": "_reversed_padding_repeated_twice",
    # Facts that tensors have no public name for: views, versions, parts of sparse and nested tensors, hooks.
    "torch.Tensor": "_base _is_view _version _nnz _values _indices _nested_tensor_size _post_accumulate_grad_hooks"
    " _is_param _is_zerotensor",
    # The address of the C++ object: two tensors share memory if their storages have the same.
    "torch.UntypedStorage": "_cdata",
    # The number of an autograd node, and a saved tensor of ``a * b`` that unpacking would check.
    "torch.autograd.graph.Node": "_sequence_nr _raw_saved_other",
    # The schema of an operator, and its place among the operators of the same name.
    "torch._ops.OpOverload": "_schema _overloadname _overloadpacket",
    # What a ScriptModule and a quantised layer keep in C++.
    "torch.jit.ScriptModule": "_c",
    "torch.ao.nn.quantized.Linear": "_weight_bias",
    # Whether distributions check their arguments by values.
    "torch.distributions.Distribution": "_validate_args",
    # Code generation of graphs: what a generator overrides, and the generator of a graph.
    "torch.fx.Graph": "_codegen",
    "torch.fx.graph.CodeGen": "_body_transformer _gen_python_code",
}

# Operators whose names begin with an underscore. They are names of schemas, which exported programs hold.
OPERATORS: dict[str, str] = {
    "aten": "_cudnn_rnn _cudnn_rnn_backward _log_softmax _softmax _scaled_dot_product_attention_math"
    " _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _to_copy _unsafe_view",
    "mkldnn": "_is_mkldnn_bf16_supported",
}
