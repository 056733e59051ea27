"""The public function of the kernel: check the arguments, call the operator."""

import torch

from . import configs, launch, ops

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def flash_lora_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    u_k: torch.Tensor | None,
    u_v: torch.Tensor | None,
    b_k: torch.Tensor | None,
    b_v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    scale: float,
    lora_scale_k: float,
    lora_scale_v: float,
    causal: bool = True,
    kv_start: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention to keys and values that are a base part plus an adapter's part of low rank, prefill or decode.

    For query head h, KV head g = h // (Hq / Hk) and rows b_g = b[g * D : (g + 1) * D] of an adapter's second matrix:

        keys   = key_g + rotate(lora_scale_k * u_k b_g^T, cos, sin)     rebuilt tile by tile, in registers
        values = value_g + lora_scale_v * u_v b_g^T     never formed: out = P value_g + lora_scale_v * (P u_v) b_g^T

    ``key`` is rotated already. The first R channels of the adapter's part are rotated here, by the cosines and sines
    of the token's own position, channel i with channel i + R / 2; the others are not. Query i stands at position
    T - S + i. Keys, values, u, cos and sin may be views of longer buffers: only their last dimension is contiguous,
    and nothing is copied. Forward only.

    Args:
        query: bf16, fp16 or fp32 [B, Hq, S, D], rotated; 1 <= S <= T.
        key, value: [B, Hk, T, D] in the dtype of query.
        u_k, u_v: [B, T, r], what the adapter's first matrix makes of a token: unscaled, unrotated, one for all heads.
            None: no adapter there. The ranks of the two may differ.
        b_k, b_v: [Hk * D, r], the adapter's second matrix (``lora_B.weight``). None where u is.
        cos, sin: [B or 1, T, R] from the model's own ``rotary_emb``, R even and at most D; both halves of a row are
            the same there, and the first is read. None: nothing is rotated (layers without positions), or u_k is None.
        scale: of the logits, positive.
        lora_scale_k, lora_scale_v: of the adapter (``scaling`` of peft); not read where u is None.
        causal: whether a query sees no token behind its own position.
        kv_start: int32 or int64 [B]: a row's first token that is none of its padding; None: 0.
        window: None, or w: a query at position p sees the tokens behind p - w only (``sliding_window``).

    Returns:
        [B, Hq, S, D] in the dtype of query, a view of a contiguous [B, S, Hq, D]. A query that sees nothing: zeros.

    u, b, cos and sin may be bf16, fp16 or fp32, whatever query is; u and b are rounded to the dtype of query.

    Raises:
        TypeError: a dtype is not one of those named.
        ValueError: a size, shape, layout or device is not; or an argument wants gradients.
        RuntimeError: query is on the CPU and Triton's interpreter is off.
    """
    _check_query(query)
    rows, heads, queries, head_dim = query.shape
    if key.ndim != 4:
        raise ValueError(f"key has shape {tuple(key.shape)}: expected [B, Hk, T, D]")
    kv_heads, tokens = key.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query has {heads} heads: expected a multiple of the {kv_heads} KV heads of key")
    if queries > tokens:
        raise ValueError(f"query has S={queries} tokens and key T={tokens}: the queries are the last of the T tokens")
    if not scale > 0:
        raise ValueError(f"scale={scale}: expected a positive number, D ** -0.5 as a rule")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected a positive number of tokens, or None for all")
    for name, tensor in (("key", key), ("value", value)):
        _check_tensor(name, tensor, (rows, kv_heads, tokens, head_dim), (query.dtype,), query)
    for side, u, b in (("k", u_k, b_k), ("v", u_v, b_v)):
        if (u is None) != (b is None):
            raise ValueError(
                f"{_one_of(f'u_{side}', u, f'b_{side}', b)}: give both, or neither where there is no adapter"
            )
        if u is not None:
            rank = _check_rank(f"u_{side}", u)
            _check_tensor(f"u_{side}", u, (rows, tokens, rank), _FLOATS, query)
            _check_tensor(f"b_{side}", b, (kv_heads * head_dim, rank), _FLOATS, query)
    _check_rotation(cos, sin, query, tokens)
    if kv_start is not None:
        _check_tensor("kv_start", kv_start, (rows,), (torch.int32, torch.int64), query)
    _check_no_gradients(query=query, key=key, value=value, u_k=u_k, u_v=u_v, b_k=b_k, b_v=b_v, cos=cos, sin=sin)
    if query.device.type == "cpu" and not launch.INTERPRETED:
        raise RuntimeError("Triton kernels need an accelerator; use source='reference'")
    return ops.flash_lora_attention(
        query,
        key,
        value,
        u_k,
        u_v,
        b_k,
        b_v,
        cos,
        sin,
        scale,
        lora_scale_k,
        lora_scale_v,
        causal,
        kv_start,
        window,
    )


def _check_query(query) -> None:
    if query.dtype not in _FLOATS:
        raise TypeError(f"query has dtype {query.dtype}: expected torch.bfloat16, torch.float16 or torch.float32")
    if query.ndim != 4:
        raise ValueError(f"query has shape {tuple(query.shape)}: expected [B, Hq, S, D]")
    head_dim = query.shape[3]
    if not 0 < head_dim <= configs.MAX_HEAD_DIM or head_dim % configs.HEAD_DIM_UNIT:
        raise ValueError(
            f"query has D={head_dim}: the Triton kernel takes multiples of {configs.HEAD_DIM_UNIT} up to "
            f"{configs.MAX_HEAD_DIM}; use source='reference'"
        )
    _check_rows("query", query)


def _one_of(name, tensor, other, other_tensor) -> str:
    given, missing = (other, name) if tensor is None else (name, other)
    return f"{given} is given and {missing} is None"


def _check_rank(name, u) -> int:
    if u.ndim != 3:
        raise ValueError(f"{name} has shape {tuple(u.shape)}: expected [B, T, r]")
    rank = u.shape[2]
    if not 1 <= rank <= configs.MAX_RANK:
        raise ValueError(
            f"{name} has rank r={rank}: the Triton kernel takes 1 to {configs.MAX_RANK}; use source='reference'"
        )
    return rank


def _check_rotation(cos, sin, query, tokens) -> None:
    if (cos is None) != (sin is None):
        raise ValueError(f"{_one_of('cos', cos, 'sin', sin)}: give both, or neither where nothing is rotated")
    if cos is None:
        return
    rows, _, _, head_dim = query.shape
    if cos.ndim != 3 or cos.shape[0] not in (1, rows) or not 0 < cos.shape[2] <= head_dim or cos.shape[2] % 2:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}: expected ({rows} or 1, {tokens}, R) with R even and at most {head_dim}"
        )
    for name, tensor in (("cos", cos), ("sin", sin)):
        _check_tensor(name, tensor, (cos.shape[0], tokens, cos.shape[2]), _FLOATS, query)


def _check_tensor(name, tensor, shape: tuple, dtypes: tuple, query) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}")
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device}: expected {query.device}, where query is")
    if name != "kv_start":
        _check_rows(name, tensor)


def _check_rows(name, tensor) -> None:
    """Refuse a tensor whose channels do not lie next to each other: a copy could be as large as the cache."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}: its last dimension must be contiguous; the others are free"
        )


def _check_no_gradients(**tensors) -> None:
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} requires a gradient: the kernel is for inference only; use torch.no_grad()")
