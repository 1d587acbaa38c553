"""Autocast: the casts that eager makes on the executor's type of device, from PyTorch's lists for that type.

The kernels run before autograd, so gradients flow through the casts as in eager. They are registered when autocast is
first used for this device, and never run while it is off.

Source:
    aten/src/ATen/autocast_mode.cpp (lists of the CPU, `cached_cast`) and autocast_mode.h (lists of CUDA, policies) of
    PyTorch 2.13. Operators that are not listed there keep the precision of their arguments.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from djinn.ir.spec import tensors_in
from djinn.session import runtime
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.once import once, registering

_NAME = "remote_accelerator"
_KEY = "AutocastPrivateUse1"

LISTS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "lower": "_addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm "
        "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer "
        "mkldnn_reorder_linear_weight mm prelu scaled_dot_product_attention",
        "fp32": "_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d "
        "binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve "
        "cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine "
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn "
        "fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d "
        "grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex "
        "linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
        "linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank "
        "linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor "
        "linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve "
        "margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss "
        "multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse "
        "poisson_nll_loss polar prod prod.dim_int qr quantile quantile.scalar reflection_pad1d reflection_pad2d "
        "replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd "
        "trace triangular_solve triplet_margin_loss view_as_complex",
        "promote": "cat index_copy stack",
    },
    "cuda": {
        "lower": "_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell "
        "_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc "
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution "
        "cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv "
        "prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention",
        "fp32": "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss "
        "cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div "
        "l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss "
        "multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist "
        "poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh "
        "smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d "
        "upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d",
        "result": "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int "
        "prod prod.dim_int softmax.int sum sum.dim_IntList",
        "append": "norm.Scalar norm.ScalarOpt_dim",
        "promote": "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
        "refuse": "binary_cross_entropy",
    },
}
"""For each type of device: the policy of each listed overload."""

_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_UNSAFE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\nsafe to autocast."
)
_key = getattr(torch._C.DispatchKey, _KEY)
_keys, _below = torch._C.DispatchKeySet(_key), torch._C._dispatch_keyset_full_after(_key)


@once
def register() -> None:
    """Register the kernels, once per process."""
    policies: dict[str, dict[str, str]] = {}
    for kind, lists in LISTS.items():
        for policy, names in lists.items():
            for name in names.split():
                policies.setdefault(name, {})[kind] = policy
    with registering("_", "IMPL") as catch_all, registering("aten", "IMPL") as aten, warnings.catch_warnings():
        catch_all.fallback(torch.library.fallthrough_kernel, _KEY)
        # PyTorch warns if a composite gets its own kernel, which is intended here.
        warnings.simplefilter("ignore")
        for name, by_kind in policies.items():
            operator = _operator(name)
            if operator is not None:
                aten.impl(name, _kernel(name, operator, by_kind), _KEY, with_keyset=True)


def is_on() -> bool:
    """Whether autocast is on for this device in this thread."""
    return torch.is_autocast_enabled(_NAME)


def lowered(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with its arguments in autocast's precision, and autocast off."""
    dtype = torch.get_autocast_dtype(_NAME)
    with _off():
        return function(*_cast(args, dtype), **{name: _cast(item, dtype) for name, item in kwargs.items()})


@contextlib.contextmanager
def _off() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(_keys), torch._C.DisableTorchFunctionSubclass():
        yield


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _kernel(name: str, operator: Any, by_kind: Mapping[str, str]) -> Callable[..., Any]:
    def plainly(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with _off():
            return operator(*args, **kwargs)

    def in_full(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with _off():
            return operator(*_cast(args, torch.float32),
                            **{name: _cast(item, torch.float32) for name, item in kwargs.items()})

    def promoted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dtype = _widest((*args, *kwargs.values()))
        with _off():
            return operator(*_cast(args, dtype), **{name: _cast(item, dtype) for name, item in kwargs.items()})

    def with_result(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        position = [argument.name for argument in operator._schema.arguments].index("dtype")
        is_given = kwargs.get("dtype") is not None or (position < len(args) and args[position] is not None)
        return plainly(args, kwargs if is_given or not _is_eligible(args[0]) else {**kwargs, "dtype": torch.float32})

    def with_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        power = () if len(args) > 1 or "p" in kwargs else (2,)
        with _off():
            return _operator(_WITH_DTYPE[name])(*args, *power, **kwargs, dtype=dtype)

    def refuse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise RuntimeError(_UNSAFE)

    table: dict[str, Callable[..., Any]] = {
        "lower": lambda args, kwargs: lowered(operator, args, kwargs), "fp32": in_full, "promote": promoted,
        "result": with_result, "append": with_dtype, "refuse": refuse,
    }

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        kind = "cpu" if device_of(runtime.current().backend.welcome).kind == "cpu" else "cuda"
        if kind in by_kind:
            return table[by_kind[kind]](args, kwargs)
        # Not listed there, but the operators that it consists of may be.
        return operator.redispatch(keyset & _below, *args, **kwargs)

    return kernel


def _is_eligible(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype.is_floating_point and item.dtype != torch.float64


def _widest(items: Any) -> torch.dtype:
    """Return the precision for mixed arguments: autocast's dtype, or float32 if any argument has it."""
    lower = torch.get_autocast_dtype(_NAME)
    for tensor in tensors_in(items):
        if tensor.dtype == torch.float32:
            return torch.float32
        if _is_eligible(tensor) and tensor.dtype != lower:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


def _cast(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, (list, tuple)):
        return [_cast(member, dtype) for member in item]
    if not _is_eligible(item) or item.dtype == dtype:
        return item
    if (
        item.dtype == torch.float32 and item.requires_grad and item.is_leaf and not item._is_view()
        and torch.is_autocast_cache_enabled() and dtype == torch.get_autocast_dtype(_NAME)
    ):
        return _cast_once(item, dtype)
    return item.to(dtype)


_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights and their casts, with the same lifetime as PyTorch's own cache of casts."""
_watched: weakref.ref[torch.Tensor] | None = None


def _cast_once(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a weight once per autocast region, so that its gradients are summed in the lower precision, as in eager."""
    global _watched
    if _watched is None or _watched() is None:
        _casts.clear()
        planted = _planted()
        if planted is None:
            return weight.to(dtype)
        _watched = weakref.ref(planted, _forget)
        del planted
    known = _casts.get(id(weight))
    if known is None:
        known = _casts[id(weight)] = (weight, weight.to(dtype))
    return known[1]


def _forget(_: Any) -> None:
    global _watched
    _watched = None
    _casts.clear()


class _Probe(torch.Tensor):
    """A CPU tensor without data. PyTorch caches its cast, and frees it when it clears the cache, which is the only sign
    of the end of an autocast region."""  # noqa: D205, D209  # one sentence belongs to the other

    made: Any = None

    @classmethod
    def probe(cls, dtype: torch.dtype) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, (1, 1), dtype=dtype, device=torch.device("cpu"))
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub declares an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = cls.probe((kwargs or {}).get("dtype", torch.bfloat16))
        if func is torch.ops.aten._to_copy.default:
            cls.made = weakref.ref(made)
        return made


def _planted() -> torch.Tensor | None:
    """Make PyTorch cache the cast of a probe, and return the cast; None if another thread's region has just ended."""
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    # Nothing may be saved for backward: checkpoints and others' hooks count what is.
    with torch.inference_mode(mode=False), torch.no_grad():
        probe = _Probe.probe(torch.float32).requires_grad_()
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        try:
            torch.mm(probe, probe)
        finally:
            torch.set_autocast_enabled("cpu", before[0])
            torch.set_autocast_dtype("cpu", before[1])
    cast: torch.Tensor | None = _Probe.made()
    return cast
