"""FLOPs of PyTorch's operations: those of matrix products, and the operations known to contain none."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _dot(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _mv(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _addmv(c: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _addbmm(c: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _addr(c: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.numel()


def _cdist(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """‖a − b‖ of every pair: a difference and a square per entry, counted like one product."""
    return 2 * prod(a.shape[:-1]) * b.shape[-2] * a.shape[-1]


def _int_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


PRODUCTS: dict[str, Callable[..., int]] = {
    "dot": _dot,
    "vdot": _dot,
    "mv": _mv,
    "addmv": _addmv,
    "addmv_": _addmv,
    "addbmm": _addbmm,
    "addr": _addr,
    "_int_mm": _int_mm,
    "_cdist_forward": _cdist,
}


def product_flops(op: Any, args: tuple, kwargs: dict, out: Any) -> int | None:
    """FLOPs of the matrix products in this call; None if it has none."""
    packet = op.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = op.__name__.split(".")[0]
    return PRODUCTS[name](*args, **kwargs) if name in PRODUCTS and op.namespace == "aten" else None


# Operations without a matrix product, in addition to those that PyTorch tags as pointwise or as a reduction.
NAMES = """
adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d
adaptive_max_pool2d_backward alias all amax amin aminmax any arange argmax argmin argsort as_strided
as_strided_ as_strided_scatter _assert_async _assert_scalar _assert_tensor_metadata avg_pool1d avg_pool2d
avg_pool2d_backward avg_pool3d bernoulli bernoulli_ binary_cross_entropy binary_cross_entropy_backward
binary_cross_entropy_with_logits bincount bucketize cat cauchy_ _chunk_cat clone _conj _conj_physical
constant_pad_nd copy copy_ _copy_from count_nonzero cummax cummin cumprod cumsum cumsum_ detach_ detach diag
diag_embed diagonal diagonal_scatter elu_backward embedding _embedding_bag _embedding_bag_forward_only
embedding_dense_backward embedding_renorm_ empty empty_like empty_permuted empty_strided equal expand
expand_copy exponential_ eye fill fill_ flip _foreach_add full full_like _fused_dropout _fused_rms_norm
_fused_rms_norm_backward gather gelu_backward glu glu_backward grid_sampler_2d grid_sampler_2d_backward
hardsigmoid_backward hardswish_backward hardtanh_backward histc huber_loss huber_loss_backward im2col index
index_add index_add_ index_copy_ index_copy index_fill_ index_fill index_put index_put_ index_select
is_pinned isin kl_div kthvalue leaky_relu_backward lift lift_fresh lift_fresh_copy linalg_vector_norm
linspace _local_scalar_dense log_normal_ log_sigmoid_backward log_sigmoid_forward _log_softmax
_log_softmax_backward_data logcumsumexp logspace logsumexp masked_fill_ masked_fill masked_scatter
masked_select max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices mean
median min mish_backward mode mse_loss mse_loss_backward multinomial nan_to_num nanmedian native_batch_norm
native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_training native_dropout
native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm
native_layer_norm_backward new_empty new_empty_strided new_full new_ones new_zeros nll_loss2d_backward
nll_loss2d_forward nll_loss_backward nll_loss_forward nonzero nonzero_static norm normal_ normal one_hot
ones ones_like permute _prelu_kernel _prelu_kernel_backward prod put rand rand_like randint randint_like
randn randn_like random_ randperm range reflection_pad1d reflection_pad2d reflection_pad2d_backward renorm
repeat repeat_interleave replication_pad1d replication_pad2d reshape _reshape_alias _reshape_copy resize_
roll rot90 rrelu_with_noise scalar_tensor scatter_ scatter scatter_add_ scatter_add scatter_reduce
searchsorted select select_backward select_scatter set_ sigmoid_backward silu_backward slice slice_backward
slice_scatter smooth_l1_loss smooth_l1_loss_backward soft_margin_loss _softmax _softmax_backward_data
softplus_backward softshrink_backward sort split split_with_sizes squeeze stack std std_mean sum sym_numel
sym_size sym_storage_offset sym_stride t take tanh_backward threshold_backward _to_copy topk trace transpose
tril tril_indices triu triu_indices unbind unfold unfold_backward uniform_ _unique2 unique_consecutive
_unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate unsafe_split
_unsafe_view unsqueeze upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
upsample_bilinear2d_backward upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward var var_mean
view view_as_complex view_as_real _weight_norm_interface where zero_ zeros zeros_like
"""
NO_PRODUCT = set(NAMES.split())


def has_no_product(op: Any) -> bool:
    """Whether an operation is known to contain no matrix product."""
    if torch.Tag.pointwise in op.tags or op.is_view:
        return True
    reduction = getattr(torch.Tag, "reduction", None)
    if reduction is not None and reduction in op.tags:
        return True
    name = op.__name__.split(".")[0]
    return op.namespace in ("aten", "prim", "prims") and (
        name in NO_PRODUCT or name.rstrip("_") in NO_PRODUCT
    )
