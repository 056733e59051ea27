"""Public functions of the kernel: check the arguments, flatten leading dimensions, call the operators."""

import torch

from . import configs, launch, ops

BLOCK_SIZE = 32
MACRO_BLOCK_SIZES = (32, 64, 128)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def quantize(
    x: torch.Tensor,
    *,
    block_size: int = 32,
    scale_rule: str = "oas",
    macro_block_size: int | None = 128,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise to MXFP4 along the last axis, with a static macro-block factor.

    Args:
        x: bf16, fp16 or fp32 [..., K], K a multiple of 32.
        block_size: 32.
        scale_rule: "oas" (a block's maximum lands in (3.5, 7]), "ocp" ([4, 8)), "even" ([3.5, 7)), "ceil" ((3, 6]).
        macro_block_size: 128, 64 or 32 values share a factor 1 + m / 256; None for none.

    Returns:
        packed u8 [..., K / 2], low nibble = even k; scale u8 [..., K / 32], byte b = 2**(b - 127); macro u8
        [..., ceil(K / macro_block_size)] or None. A block with a NaN or an infinity gets scale byte 255 and codes 0.

    Raises:
        TypeError: x is not one of the three dtypes.
        ValueError: K, block_size, scale_rule or macro_block_size is not supported.
        RuntimeError: x is on the CPU and Triton's interpreter is off.
    """
    _check_block_size(block_size)
    _check_rule(scale_rule)
    macro = 0 if macro_block_size is None else _check_macro_size("macro_block_size", macro_block_size)
    _check_dense("x", x)
    _check_device(x)
    lead, k = x.shape[:-1], x.shape[-1]
    packed, scale, macro_bytes = ops.quantize(_rows(x), scale_rule, macro)
    return (
        packed.reshape(*lead, k // 2),
        scale.reshape(*lead, k // 32),
        macro_bytes.reshape(*lead, macro_bytes.shape[-1]) if macro else None,
    )


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values of a packed tensor, [..., K] in ``dtype``, saturating at its largest finite value; NaN blocks stay NaN.

    Args:
        packed: u8 [..., K / 2].
        scale: u8 [..., K / 32].
        macro: u8 [..., ceil(K / macro_block_size)] or None.
        block_size: 32.
        macro_block_size: 128, 64 or 32; unused without ``macro``.
        dtype: bf16, fp16 or fp32.

    Raises:
        TypeError, ValueError, RuntimeError: as `quantize`, and for shapes that do not belong together.
    """
    _check_block_size(block_size)
    _check_packed(packed, scale, macro, macro_block_size)
    if dtype not in _FLOATS:
        raise TypeError(f"dtype={dtype}: expected torch.bfloat16, torch.float16 or torch.float32")
    _check_device(packed)
    k = 2 * packed.shape[-1]
    macro_rows = None if macro is None else _rows(macro)
    w = ops.dequantize(_rows(packed), _rows(scale), macro_rows, macro_block_size, dtype)
    return w.reshape(*packed.shape[:-1], k)


def gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
) -> torch.Tensor:
    """x @ W^T + bias with W in MXFP4 and x as it is (W4A16); float32 accumulation, [..., N] in x's dtype.

    W is decoded in registers, rounded to x's dtype; float32 products are IEEE. fp16 holds weights up to 65504 only.

    Args:
        x: bf16, fp16 or fp32 [..., K].
        packed: u8 [N, K / 2].
        scale: u8 [N, K / 32].
        macro: u8 [N, ceil(K / macro_block_size)] or None.
        bias: floating [N] or None.
        block_size: 32.
        macro_block_size: 128, 64 or 32; unused without ``macro``.

    Raises:
        TypeError, ValueError, RuntimeError: as `quantize`, and for shapes or devices that do not belong together.
    """
    _check_block_size(block_size)
    _check_product(x, packed, scale, macro, bias, macro_block_size)
    y = ops.gemm(_rows(x), *_weight(packed, scale, macro, bias), macro_block_size)
    return y.reshape(*x.shape[:-1], packed.shape[0])


def gemm_w4a4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    block_size: int = 32,
    macro_block_size: int = 128,
    scale_rule: str = "oas",
    activation_macro_block_size: int | None = 64,
) -> torch.Tensor:
    """`gemm` with x quantised to MXFP4 first (W4A4), by block-scaled dots where the hardware has them.

    Args:
        x, packed, scale, macro, bias, block_size, macro_block_size: as `gemm`.
        scale_rule: of x, as in `quantize`.
        activation_macro_block_size: of x: 64, 128 or None.

    Raises:
        TypeError, ValueError, RuntimeError: as `gemm`.
    """
    _check_block_size(block_size)
    _check_rule(scale_rule)
    x_macro = 0
    if activation_macro_block_size is not None:
        if activation_macro_block_size not in (64, 128):
            raise ValueError(
                f"activation_macro_block_size={activation_macro_block_size}: the kernel takes 64, 128 or None; "
                "use source='reference'"
            )
        x_macro = activation_macro_block_size
    _check_product(x, packed, scale, macro, bias, macro_block_size)
    y = ops.gemm_w4a4(_rows(x), *_weight(packed, scale, macro, bias), macro_block_size, scale_rule, x_macro)
    return y.reshape(*x.shape[:-1], packed.shape[0])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] to contiguous [rows, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _weight(packed, scale, macro, bias):
    return (
        _rows(packed),
        _rows(scale),
        None if macro is None else _rows(macro),
        None if bias is None else bias.contiguous(),
    )


def _check_block_size(block_size: int) -> None:
    if block_size != BLOCK_SIZE:
        raise ValueError(f"block_size={block_size}: the Triton kernels take blocks of 32; use source='reference'")


def _check_rule(rule: str) -> None:
    if rule not in configs.THRESHOLDS:
        raise ValueError(
            f"scale_rule={rule!r}: the Triton kernels take {', '.join(configs.THRESHOLDS)}; use source='reference'"
        )


def _check_macro_size(name: str, size: int) -> int:
    if size not in MACRO_BLOCK_SIZES:
        raise ValueError(f"{name}={size}: expected one of {', '.join(map(str, MACRO_BLOCK_SIZES))}, or None for none")
    return size


def _check_dense(name: str, x: torch.Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}: expected torch.bfloat16, torch.float16 or torch.float32")
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: its last dimension must be a positive multiple of {BLOCK_SIZE}"
        )


def _check_device(x: torch.Tensor) -> None:
    if x.device.type == "cpu" and not launch.INTERPRETED:
        raise RuntimeError("Triton kernels need an accelerator; use source='reference'")


def _check_packed(packed, scale, macro, macro_size, ndim: int | None = None) -> None:
    for name, tensor in (("packed", packed), ("scale", scale), ("macro", macro)):
        if tensor is not None and tensor.dtype != torch.uint8:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected torch.uint8")
        if tensor is not None and tensor.device != packed.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {packed.device}, where packed is")
    if packed.ndim == 0 or (ndim is not None and packed.ndim != ndim) or packed.shape[-1] == 0:
        wanted = "[N, K / 2]" if ndim else "[..., K / 2]"
        raise ValueError(f"packed has shape {tuple(packed.shape)}: expected {wanted}")
    k = 2 * packed.shape[-1]
    if k % BLOCK_SIZE:
        raise ValueError(f"packed has shape {tuple(packed.shape)}, so K={k}: K must be a multiple of {BLOCK_SIZE}")
    expected = (*packed.shape[:-1], k // BLOCK_SIZE)
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}: expected {expected} for K={k} and blocks of 32")
    if macro is not None:
        _check_macro_size("macro_block_size", macro_size)
        expected = (*packed.shape[:-1], -(-k // macro_size))
        if tuple(macro.shape) != expected:
            raise ValueError(
                f"macro has shape {tuple(macro.shape)}: expected {expected} for K={k} and "
                f"macro_block_size={macro_size}"
            )


def _check_product(x, packed, scale, macro, bias, macro_size) -> None:
    _check_dense("x", x)
    _check_packed(packed, scale, macro, macro_size, ndim=2)
    if x.shape[-1] != 2 * packed.shape[-1]:
        raise ValueError(f"x has K={x.shape[-1]} but packed holds K={2 * packed.shape[-1]}")
    if bias is not None and (bias.dtype not in _FLOATS or tuple(bias.shape) != (packed.shape[0],)):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}: expected bfloat16, float16 or float32 ({packed.shape[0]},)"
        )
    for name, tensor in (("packed", packed), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {x.device}, where x is")
    _check_device(x)
