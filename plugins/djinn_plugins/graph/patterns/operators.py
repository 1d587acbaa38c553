"""The operators that the patterns know, grouped by their effect on a value.

Names are those of ATen without namespace, overload and the underscore of in-place operations. They are plain data that
is not looked up in PyTorch, so graphs from another release can be read.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def short_name(operation: str) -> str:
    """Shorten ``aten::add_.Tensor`` to ``add``; names of other namespaces, whose meaning is unknown, stay unchanged."""
    name = operation.removeprefix("aten::").partition(".")[0]
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return name


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names("""
    view _unsafe_view reshape _reshape_alias view_as reshape_as unsqueeze squeeze transpose permute movedim swapaxes t
    mT expand expand_as broadcast_to contiguous clone detach alias lift_fresh flatten unflatten view_copy expand_copy
    permute_copy transpose_copy unsqueeze_copy squeeze_copy t_copy alias_copy detach_copy as_strided numpy_T""")
"""The same elements in another shape."""

CASTS = _names("_to_copy to type_as float half bfloat16 convert_element_type")
"""The same elements in another dtype, or on another device."""

PARTS = _names("slice select split split_with_sizes chunk unbind narrow unsafe_chunk unsafe_split tensor_split "
               "slice_copy select_copy split_copy unbind_copy split_with_sizes_copy")
"""Some of the elements, by position."""

DROPOUTS = _names("dropout native_dropout feature_dropout alpha_dropout")

SAME = VIEWS | CASTS | DROPOUTS
"""Operators that searches look through: the value is essentially unchanged."""

ACTIVATIONS = _names("""
    gelu relu silu tanh sigmoid relu6 leaky_relu elu selu celu mish softplus hardswish hardtanh hardsigmoid glu erf
    log_sigmoid log_sigmoid_forward prelu rrelu rrelu_with_noise softsign threshold tanhshrink clamp clamp_min swish""")
"""Nonlinear elementwise functions, or model blocks that consist of one."""

ARITHMETIC = _names("""
    add sub mul div rsub neg pow square abs exp exp2 addcmul addcdiv lerp maximum minimum where masked_fill reciprocal
    sqrt rsqrt log log1p sign sgn bernoulli nan_to_num fill floor round sum_to_size true_divide multiply divide
    subtract xlogy sin cos""")
"""Elementwise arithmetic."""

FACTORIES = _names("""
    empty zeros ones full arange scalar_tensor empty_like zeros_like ones_like full_like rand rand_like randn
    randn_like new_empty new_zeros new_ones new_full eye linspace empty_strided new_empty_strided randint
    randperm""")
"""Creation of values; only the metadata of an operand is used."""

FUSED_NORMS = {
    "layer_norm": "layer", "native_layer_norm": "layer",
    "rms_norm": "rms", "_fused_rms_norm": "rms", "rms_norm_training": "rms",
    "group_norm": "group", "native_group_norm": "group",
    "batch_norm": "batch", "native_batch_norm": "batch", "_native_batch_norm_legit": "batch",
    "_native_batch_norm_legit_no_training": "batch", "_native_batch_norm_legit_functional": "batch",
    "_batch_norm_with_update": "batch", "_batch_norm_no_update": "batch", "_batch_norm_impl_index": "batch",
    "batch_norm_training": "batch", "batch_norm_inference": "batch",
    "cudnn_batch_norm": "batch", "miopen_batch_norm": "batch", "instance_norm": "batch",
}
"""Normalisation as one operation, and its kind."""

CONVOLUTIONS = _names("""
    convolution convolution_overrideable _convolution _convolution_mode conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu
    cudnn_convolution_add_relu miopen_convolution miopen_depthwise_convolution mkldnn_convolution slow_conv3d
    slow_conv2d thnn_conv2d _slow_conv2d_forward conv_depthwise3d _conv_depthwise2d""")

LOOKUPS = _names("embedding embedding_bag _embedding_bag _embedding_bag_forward_only")

RECURRENT_LAYERS = {
    "lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn", "mkldnn_rnn_layer": "", "_cudnn_rnn": "",
    "miopen_rnn": "", "quantized_lstm": "lstm", "quantized_gru": "gru",
}
"""One or several recurrent layers as one operation."""

RECURRENT_CELLS = {
    "lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn", "rnn_relu_cell": "rnn",
    "_thnn_fused_lstm_cell": "lstm", "_thnn_fused_gru_cell": "gru",
}
"""One step of a recurrent layer as one operation."""

ATTENTIONS: dict[str, tuple[int, int]] = {
    "scaled_dot_product_attention": (3, 5),
    "_scaled_dot_product_attention_math": (3, 5),
    "_scaled_dot_product_attention_math_for_mps": (3, 5),
    "_scaled_dot_product_flash_attention": (-1, 4),
    "_scaled_dot_product_flash_attention_for_cpu": (-1, 4),
    "_scaled_dot_product_efficient_attention": (3, 6),
    "_scaled_dot_product_cudnn_attention": (3, 6),
    "_scaled_dot_product_fused_attention_overrideable": (3, 5),
}
"""Attention as one operation; positions of its mask and of ``is_causal`` among its arguments, -1 for a keyword."""

PRODUCTS = _names("bmm matmul baddbmm mm addmm dot mv addmv einsum")
"""Matrix products whose factors may both be activations."""

GROUPED_PRODUCTS = _names("_grouped_mm _scaled_grouped_mm transformers::grouped_mm_fallback bmm baddbmm")
"""Products of each row with the weight of its expert."""

LINEAR_OPERANDS: dict[str, tuple[int, int]] = {
    "linear": (0, 1), "addmm": (1, 2), "mm": (0, 1), "matmul": (0, 1), "_addmm_activation": (1, 2),
    "_weight_int8pack_mm": (0, 1), "_weight_int4pack_mm": (0, 1), "_scaled_mm": (0, 1), "_int_mm": (0, 1),
    "mkldnn_linear": (0, 1), "_mkl_linear": (0, 1), "linear_relu": (0, 1),
}
"""Products with a weight: positions of the input and of the weight among the operands."""

SOFTMAXES = _names("softmax _softmax _safe_softmax")

CACHE_WRITES: dict[str, int] = {
    "index_copy": 2, "index_put": -1, "_index_put_impl": -1, "copy": 1, "slice_scatter": 1, "select_scatter": 1,
    "scatter": -1, "_unsafe_index_put": -1,
}
"""Writes to a part of a tensor, with the position of the written value among the operands."""

REORDERINGS = _names("index_select index repeat_interleave gather repeat roll")
"""Operations of beam search and repetition on a whole cache."""

CHOICES = _names("""
    argmax argmin max topk sort msort multinomial softmax _softmax _safe_softmax log_softmax _log_softmax logsumexp
    cumsum lt gt le ge eq ne scatter gather index index_select masked_select logical_not logical_and logical_or any all
    bitwise_and bitwise_or bitwise_not isin _local_scalar_dense item nonzero cat stack isnan isinf isfinite where
    masked_fill amax amin nll_loss nll_loss_nd nll_loss_forward nll_loss2d nll_loss2d_forward cross_entropy
    cross_entropy_loss mse_loss binary_cross_entropy_with_logits binary_cross_entropy smooth_l1_loss huber_loss kl_div
    l1_loss mean sum ctc_loss _ctc_loss std var norm linalg_vector_norm sigmoid index_put index_fill expand sub div mul
    add neg exp log pow square sqrt rsub clamp clamp_min clamp_max abs nan_to_num flip exponential one_hot log_sigmoid
    log_sigmoid_forward logcumsumexp upsample_bilinear2d upsample_nearest2d diff split copy set count_nonzero""")
"""Operations after a model's last product: the choice of a token or a class, or a loss."""
