"""For which dtypes CUDA has no kernel of an operator, though PyTorch's rules for shapes take them: bfloat16 in linear
algebra, integers in pools and losses. The program ends where it ends on a GPU, with the name that PyTorch has for the
kernel.

Recorded from the CUDA builds of 2.13.0 and 2.15.0, by running their operator databases in six dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from graph.fake_cuda.operators.refused import CHECKS, not_implemented
from graph.workspaces.metadata import tensors
from traces.release import version_of

if TYPE_CHECKING:
    from graph.fake_cuda.torch_private import Operator

Kernel = Callable[..., Any]

_HALF: Final = frozenset({torch.bfloat16, torch.float16})
_BOOL: Final = frozenset({torch.bool})
_INTEGERS: Final = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}) | _BOOL
#: Later releases may have more kernels.
_NEWEST: Final = (2, 15)
#: cuBLAS factorizes matrices of up to so many rows several at once, and cuSOLVER's Jacobi rotations take such.
_ROWS_OF_LU, _ROWS_OF_QR, _ROWS_OF_SVD = 512, 256, 32


def _lu(matrix: torch.Tensor) -> str:
    rows, columns = matrix.shape[-2:]
    if rows != columns or (_count(matrix) > 1 and rows > _ROWS_OF_LU):
        return "lu_factor_magma_batched"
    return "lu_factor_cusolver" if _count(matrix) == 1 else "lu_factor_cublas"


def _qr(matrix: torch.Tensor) -> str:
    rows = matrix.shape[-2]
    several = rows <= _ROWS_OF_QR and _count(matrix) >= max(2, rows // 16)
    return "geqrf_batched_cuda" if several else "geqrf_cuda"


def _svd(matrix: torch.Tensor) -> str:
    return "svd_cuda_gesvdjBatched" if max(matrix.shape[-2:]) <= _ROWS_OF_SVD else "svd_cuda_gesvdj"


def _potrs(matrix: torch.Tensor) -> str:
    return "cholesky_cuda_potrs" if _count(matrix) == 1 else "triangular_solve_cuda"


def _count(matrix: torch.Tensor) -> int:
    return matrix.shape[:-2].numel()


#: Special functions of 16 bits: `special_erfcx` has the kernel erfcx_cuda.
_SPECIAL: Final = (
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u "
    "chebyshev_polynomial_v chebyshev_polynomial_w erfcx hermite_polynomial_h hermite_polynomial_he "
    "laguerre_polynomial_l legendre_polynomial_p log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 ndtri scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t "
    "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 "
    "zeta"
)
#: What has no kernel for these dtypes: operators, by the kernel's name, or by what says it of the first tensor.
_MISSING: Final[Sequence[tuple[frozenset[torch.dtype], Mapping[str | Callable[[torch.Tensor], str], str]]]] = (
    (
        _HALF,
        {
            _lu: "linalg_lu_factor_ex linalg_lu _linalg_det _linalg_solve_ex",
            _qr: "linalg_qr geqrf",
            _svd: "_linalg_svd",
            _potrs: "_cholesky_solve_helper cholesky_inverse",
            **{f"{name}_cuda": f"special_{name}" for name in _SPECIAL.split()},
            "bincount_cuda": "bincount",
            "bitwise_not_cuda": "bitwise_not",
            "cdist_cuda": "_cdist_forward",
            "cholesky_cusolver": "linalg_cholesky_ex cholesky",
            "ctc_loss_cuda": "_ctc_loss _ctc_loss.Tensor",
            "gcd_cuda": "gcd",
            "igamma_cuda": "igamma",
            "igammac_cuda": "igammac",
            "lcm_cuda": "lcm",
            "ldl_factor_looped_cusolver": "linalg_ldl_factor_ex",
            "ldl_solve_looped_cusolver": "linalg_ldl_solve",
            "linalg_eig_cuda": "linalg_eig _linalg_eigvals",
            "linalg_eigh_cuda": "_linalg_eigh",
            "lshift_cuda": "bitwise_left_shift.Tensor",
            "lu_solve_cublas": "linalg_lu_solve",
            "orgmr_cuda": "ormqr",
            "orgqr_cuda": "linalg_householder_product",
            "rshift_cuda": "bitwise_right_shift.Tensor",
            "triangular_solve_cuda": "triangular_solve linalg_solve_triangular",
        },
    ),
    (frozenset({torch.bfloat16}), {"histc": "histc"}),
    (
        _INTEGERS,
        {
            _lu: "linalg_lu_factor_ex linalg_lu",
            _qr: "geqrf",
            _potrs: "_cholesky_solve_helper cholesky_inverse",
            "GroupNormKernelImpl": "native_group_norm",
            "LayerNormKernelImpl": "native_layer_norm _fused_rms_norm",
            "adaptive_avg_pool2d_cuda": "_adaptive_avg_pool2d",
            "adaptive_avg_pool3d_cuda": "_adaptive_avg_pool3d",
            "adaptive_max_pool2d_cuda": "adaptive_max_pool2d",
            "adaptive_max_pool3d_cuda": "adaptive_max_pool3d",
            "addmv_impl_cuda": "mv addmv",
            "avg_pool2d_out_cuda_frame": "avg_pool2d",
            "avg_pool3d_out_cuda": "avg_pool3d",
            "batch_norm_stats_cuda": "native_batch_norm _native_batch_norm_legit _batch_norm_with_update",
            "binary_cross_entropy_out_cuda": "binary_cross_entropy",
            "check_uniform_bounds": "uniform_",
            "conv_depthwise2d_forward_cuda": "_conv_depthwise2d",
            "ctc_loss_cuda": "_ctc_loss _ctc_loss.Tensor",
            "dot": "dot vdot",
            "elu_cuda": "elu",
            "embedding_renorm_cuda_": "embedding_renorm",
            "frac_cuda": "frac",
            "fused_dropout": "native_dropout",
            "glu_cuda": "glu",
            "grid_sampler_2d_cuda": "grid_sampler_2d",
            "grid_sampler_3d_cuda": "grid_sampler_3d",
            "hardshrink_cuda": "hardshrink",
            "hardsigmoid_cuda": "hardsigmoid",
            "hardswish_cuda": "hardswish",
            "huber_cuda": "huber_loss",
            "hypot_cuda": "hypot",
            "igamma_cuda": "igamma",
            "igammac_cuda": "igammac",
            "im2col_out_cuda": "im2col",
            "leaky_relu_cuda": "leaky_relu",
            "lerp_cuda": "lerp.Scalar lerp.Tensor",
            "linalg_eigh_cuda": "_linalg_eigh",
            "log_normal_cuda": "log_normal_",
            "log_sigmoid_forward_cuda": "log_sigmoid_forward",
            "logaddexp2_cuda": "logaddexp2",
            "logaddexp_cuda": "logaddexp",
            "masked_scale": "native_dropout_backward",
            "max_pool2d_with_indices_out_cuda_frame": "max_pool2d_with_indices",
            "max_pool3d_with_indices_out_frame": "max_pool3d_with_indices",
            "mish_cuda": "mish",
            "mse_cuda": "mse_loss",
            "multi_margin_loss_cuda": "multi_margin_loss",
            "multilabel_margin_loss_forward_kernel": "multilabel_margin_loss_forward",
            "nextafter_cuda": "nextafter",
            "normal_kernel_cuda": "normal_ normal.Tensor_Tensor normal.Tensor_float",
            "orgmr_cuda": "ormqr",
            "orgqr_cuda": "linalg_householder_product",
            "prelu_cuda": "_prelu_kernel",
            "round_cuda": "round.decimals",
            "rrelu_with_noise_out_cuda": "rrelu_with_noise",
            "silu_cuda": "silu",
            "smooth_l1_cuda": "smooth_l1_loss",
            "softplus_cuda": "softplus",
            "softshrink_check": "softshrink",
            "triangular_solve_cuda": "triangular_solve linalg_solve_triangular",
            "upsample_bicubic2d_out_frame": "upsample_bicubic2d",
            "upsample_bilinear2d_out_frame": "upsample_bilinear2d _upsample_bilinear2d_aa",
            "upsample_linear1d_out_frame": "upsample_linear1d",
            "upsample_trilinear3d_out_frame": "upsample_trilinear3d",
        },
    ),
    (
        _INTEGERS - {torch.uint8},
        {
            "upsample_nearest1d_out_frame": "upsample_nearest1d _upsample_nearest_exact1d",
            "upsample_nearest2d_out_frame": "upsample_nearest2d _upsample_nearest_exact2d",
        },
    ),
    (
        _BOOL,
        {
            "addcmul_cuda": "addcmul",
            "ceil_cuda": "ceil",
            "cross_cuda": "linalg_cross",
            "div_floor_cuda": "floor_divide",
            "floor_cuda": "floor",
            "fmod_cuda": "fmod.Tensor",
            "gcd_cuda": "gcd",
            "geometric_cuda": "geometric_",
            "histc": "histc",
            "kthvalue_cuda": "kthvalue.values",
            "lcm_cuda": "lcm",
            "lshift_cuda": "bitwise_left_shift.Tensor",
            "median_out_impl": "median.dim_values nanmedian.dim_values",
            "pow_cuda": "pow.Tensor_Tensor",
            "reflection_pad1d_out": "reflection_pad1d",
            "reflection_pad2d_out_template": "reflection_pad2d",
            "remainder_cuda": "remainder.Tensor",
            "replication_pad1d_cuda": "replication_pad1d",
            "replication_pad2d_cuda": "replication_pad2d",
            "round_cuda": "round",
            "rshift_cuda": "bitwise_right_shift.Tensor",
            "searchsorted_out_cuda": "bucketize.Tensor searchsorted.Tensor",
            "threshold_cuda": "threshold",
            "trunc_cuda": "trunc",
        },
    ),
)
#: ... and what 2.15 has a kernel for.
_MISSING_OF_OLD: Final = ((_HALF, {"angle_cuda": "angle"}), (frozenset({torch.float16}), {"polar_cuda": "polar"}))


@functools.cache
def _missing() -> Mapping[str, Mapping[torch.dtype, str | Callable[[torch.Tensor], str]]]:
    """By operator and dtype: the kernel that is not there."""
    found: dict[str, dict[torch.dtype, str | Callable[[torch.Tensor], str]]] = {}
    release = version_of(torch.__version__)[:2]
    old = _MISSING_OF_OLD if release <= (2, 13) else ()
    for dtypes, kernels in (*_MISSING, *old) if release <= _NEWEST else ():
        for kernel, operators in kernels.items():
            for name in operators.split():
                found.setdefault(name, {}).update(dict.fromkeys(dtypes, kernel))
    return found


def check_of(func: Operator) -> Callable[[Sequence[Any]], None] | None:
    """What raises NotImplementedError, as PyTorch does, where an operator has no kernel for its arguments' dtype; None
    of operators that have one for all. What is computed in a wider dtype has one for that."""
    name, overload = func._opname, "" if func._overloadname == "default" else f".{func._overloadname}"
    missing = _missing().get(name + overload) or _missing().get(name.removesuffix("_") + overload)
    if missing is None:
        return None

    def check(args: Sequence[Any]) -> None:
        first, *others = tensors(args)
        kernel = missing.get(first.dtype) if first.numel() else None
        if kernel is not None and not any(_is_wider(one, first) for one in others):
            raise not_implemented(kernel if isinstance(kernel, str) else kernel(first), first)

    return check


def checked(func: Operator, kernel: Kernel) -> Kernel:
    """A kernel that begins with this check and that of what is refused, if there are any."""
    checks = [check for check in (CHECKS.get(func), check_of(func)) if check is not None]
    if not checks:
        return kernel

    def called(*args: object, **kwargs: object) -> Any:
        for check in checks:
            check(args)
        return kernel(*args, **kwargs)

    return called


def _is_wider(other: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether two tensors are computed in another dtype than the first one's."""
    return other.dtype != first.dtype and _rank(other) >= _rank(first)


def _rank(tensor: torch.Tensor) -> int:
    if tensor.is_complex() or tensor.is_floating_point():
        return 3 if tensor.is_complex() else 2
    return int(tensor.dtype is not torch.bool)
