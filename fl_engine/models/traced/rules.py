"""The rules of operations by their name in torch, and the reasons why others cannot be cut."""

from __future__ import annotations

from fl_engine.models.traced import operations as ops


def _named(rule: ops.Rule, names: str) -> dict[str, ops.Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, ops.Rule] = {
    **_named(
        ops.by_element,
        "add add_ sub sub_ rsub mul mul_ div div_ truediv pow maximum minimum where lerp iadd isub imul itruediv "
        "clamp clamp_ clamp_min clamp_max clip neg abs square sqrt rsqrt reciprocal exp expm1 log log1p erf sin cos "
        "sign floor round "
        "relu relu_ relu6 gelu silu silu_ mish hardswish hardsigmoid hardtanh sigmoid sigmoid_ tanh tanh_ elu elu_ "
        "selu celu leaky_relu leaky_relu_ softplus softsign softshrink hardshrink tanhshrink threshold logsigmoid "
        "identity dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
        "eq ne lt le gt ge masked_fill",
    ),
    **_named(
        ops.first,
        "contiguous clone detach float double half to type type_as zeros_like ones_like new_zeros_like "
        "instance_norm requires_grad_",
    ),
    **_named(
        ops.pooled,
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d interpolate upsample spatial_pad",
    ),
    **_named(ops.padded, "pad"),
    **_named(ops.reduced, "mean sum amax amin max min var std norm prod logsumexp median argmax argmin any all"),
    **_named(ops.along, "softmax log_softmax softmin normalize cumsum"),
    **_named(ops.reshaped, "flatten view reshape unflatten view_as reshape_as"),
    **_named(ops.moved, "permute transpose swapaxes swapdims movedim moveaxis t T mT squeeze unsqueeze"),
    **_named(ops.expanded, "expand expand_as"),
    **_named(ops.joined, "cat concat concatenate"),
    **_named(ops.stacked, "stack"),
    **_named(ops.split, "chunk split tensor_split unbind"),
    **_named(ops.indexed, "getitem"),
}

_PRODUCT, _ATTENTION = "multiplies two activations as matrices", "is attention"
REASONS = {
    "matmul": _PRODUCT, "bmm": _PRODUCT, "baddbmm": _PRODUCT, "mm": _PRODUCT, "einsum": _PRODUCT,
    "scaled_dot_product_attention": _ATTENTION, "multi_head_attention_forward": _ATTENTION,
    "layer_norm": "normalises over channels", "pixel_shuffle": "moves channels (pixel_shuffle)",
    "channel_shuffle": "moves channels (channel_shuffle)", "glu": "splits channels (glu)",
    "linear": "calls F.linear (an nn.Linear can be cut)",
    "conv1d": "calls F.conv1d (an nn.Conv1d can be cut)",
    "conv2d": "calls F.conv2d (an nn.Conv2d can be cut)",
}  # fmt: skip
"""Why an operation that has no rule cannot be cut."""

MODULES = {
    "ReLU": "relu", "ReLU6": "relu6", "GELU": "gelu", "SiLU": "silu", "Mish": "mish", "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid", "Hardtanh": "hardtanh", "Sigmoid": "sigmoid", "Tanh": "tanh", "ELU": "elu",
    "SELU": "selu", "CELU": "celu", "LeakyReLU": "leaky_relu", "Softplus": "softplus", "Softsign": "softsign",
    "Softshrink": "softshrink", "Hardshrink": "hardshrink", "Tanhshrink": "tanhshrink", "Threshold": "threshold",
    "LogSigmoid": "logsigmoid", "Identity": "identity", "Dropout": "dropout", "Dropout1d": "dropout1d",
    "Dropout2d": "dropout2d", "Dropout3d": "dropout3d", "AlphaDropout": "alpha_dropout",
    "FeatureAlphaDropout": "feature_alpha_dropout", "RReLU": "leaky_relu", "Flatten": "flatten",
    "Unflatten": "unflatten", "PixelShuffle": "pixel_shuffle", "ChannelShuffle": "channel_shuffle", "GLU": "glu",
    **{f"{kind}Pool{n}d": f"{name}_pool{n}d" for n in (1, 2, 3)
       for kind, name in (("Max", "max"), ("Avg", "avg"), ("LP", "lp"), ("AdaptiveAvg", "adaptive_avg"),
                          ("AdaptiveMax", "adaptive_max"))},
    "Upsample": "interpolate", "UpsamplingNearest2d": "interpolate", "UpsamplingBilinear2d": "interpolate",
    **{f"{kind}Pad{n}d": "spatial_pad" for n in (1, 2, 3)
       for kind in ("Zero", "Constant", "Reflection", "Replication", "Circular")},
    "MultiheadAttention": "multi_head_attention_forward",
}  # fmt: skip
"""The operations of torch's modules without weights."""

SOFTMAX = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Softmin": "softmin"}
"""These modules have an axis, `dim`."""


def unknown(call: ops.Call) -> ops.Mixes:
    """The rule of all other operations."""
    return ops.Mixes(REASONS.get(call.name, f"calls {call.name}, which may mix channels"), ops.every(call))
