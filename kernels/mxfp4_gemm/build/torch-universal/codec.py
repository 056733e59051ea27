"""Device functions that read and write the MXFP4 format; exact integer and power-of-two arithmetic only.

E2M1 code: ``s e e m``; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Block scale: E8M0 byte b means ``2**(b - 127)``, 255 is
NaN. Macro byte m: the stored values were multiplied by ``1 + m / 256``, so decoding multiplies by ``256 / (256 + m)``.
"""

import triton
import triton.language as tl

# `s.......eem` at the place where a float32 keeps its sign, two lowest exponent bits and highest mantissa bit.
_FIELD = tl.constexpr(0x81C00000 - (1 << 32))
_TWO_POW_126 = tl.constexpr(2.0**126)


@triton.jit
def decode_codes(packed):
    """Values of packed codes: u8 [R, C], low nibble first, to float32 [R, 2C].

    The three magnitude bits, placed across the exponent/mantissa boundary of a float32, read as the E2M1 value times
    2**-126, its subnormal 0.5 included (float32 subnormals work the same way). One exact multiply takes the factor
    out. An arithmetic right shift brings the sign along, so no select is needed.
    """
    word = packed.to(tl.int32)
    low = ((word << 28) >> 6) & _FIELD
    high = ((word << 24) >> 6) & _FIELD
    bits = tl.reshape(tl.join(low, high), [packed.shape[0], 2 * packed.shape[1]])
    return bits.to(tl.float32, bitcast=True) * _TWO_POW_126


@triton.jit
def decode_words(words):
    """The same for codes read eight at a time: i32 [R, C], lowest nibble first, to float32 [R, 8C]."""
    e0 = ((words << 28) >> 6) & _FIELD
    e1 = ((words << 24) >> 6) & _FIELD
    e2 = ((words << 20) >> 6) & _FIELD
    e3 = ((words << 16) >> 6) & _FIELD
    e4 = ((words << 12) >> 6) & _FIELD
    e5 = ((words << 8) >> 6) & _FIELD
    e6 = ((words << 4) >> 6) & _FIELD
    e7 = (words >> 6) & _FIELD
    # join appends an axis, so the most significant index bit must be joined first.
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    bits = tl.reshape(tl.join(even, odd), [words.shape[0], 8 * words.shape[1]])
    return bits.to(tl.float32, bitcast=True) * _TWO_POW_126


@triton.jit
def decode_scale(byte):
    """Power of two of an E8M0 byte in float32: 0 gives the subnormal 2**-127, 255 gives NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    bits = tl.where(b == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_macro(byte):
    """Factor 256 / (256 + m) of a macro byte, correctly rounded in float32."""
    denominator = 256.0 + byte.to(tl.float32)
    return tl.div_rn(tl.full(denominator.shape, 256.0, tl.float32), denominator)


@triton.jit
def approximate_macro(byte):
    """The same to within 2 units in the last place, in three instructions: for factors of float32 partial sums."""
    return 256.0 / (256.0 + byte.to(tl.float32))


@triton.jit
def apply_scale(values, scale):
    """Multiply float32 [R, C] by one scale per 32 columns, float32 [R, C / 32]."""
    blocks: tl.constexpr = values.shape[1] // 32
    grouped = tl.reshape(values, [values.shape[0], blocks, 32]) * scale[:, :, None]
    return tl.reshape(grouped, [values.shape[0], values.shape[1]])


@triton.jit
def split_exponent(magnitude_bits):
    """Exponent E and mantissa field of a finite float32 given by its sign-free bits, subnormals normalised.

    The value is ``2**E * (1 + mantissa / 2**23)``; for zero the result is meaningless but defined.
    """
    # A subnormal is its bits times 2**-149, and an integer below 2**23 converts to float32 exactly.
    normalised = magnitude_bits.to(tl.float32).to(tl.int32, bitcast=True)
    subnormal = magnitude_bits < 0x00800000
    bits = tl.where(subnormal, normalised, magnitude_bits)
    exponent = (bits >> 23) - tl.where(subnormal, 127 + 149, 127)
    return exponent, bits & 0x007FFFFF


@triton.jit
def power_of_two(exponent):
    """2**exponent in float32 for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_magnitude(magnitude):
    """E2M1 magnitude code (0..7) of non-negative float32 values below 8: nearest, ties to the even code, 6 at most."""
    # Below 2 the step is 0.5, which is the last place of a float32 between 2**22 and 2**23: the addition rounds.
    small = (magnitude + 4194304.0).to(tl.int32, bitcast=True) & 7
    # From 2 on: round the mantissa to one bit, half to even, by the usual addition to the bits.
    bits = magnitude.to(tl.int32, bitcast=True)
    large = ((bits + 0x001FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    return tl.where(magnitude < 2.0, small, tl.minimum(large, 7))


@triton.jit
def encode_block(x, threshold: tl.constexpr, macro: tl.constexpr):
    """Quantise float32 [R, C] to MXFP4 with a static macro-block factor per row.

    ``threshold``: a block's exponent is floor(log2 a) - 2, plus 1 where the mantissa field of a exceeds it.
    Returns (codes int32 [R, C], scale bytes int32 [R, C / 32], macro bytes int32 [R], zeros without ``macro``).
    """
    rows: tl.constexpr = x.shape[0]
    blocks: tl.constexpr = x.shape[1] // 32
    bits = tl.reshape(x.to(tl.int32, bitcast=True), [rows, blocks, 32])
    magnitude = bits & 0x7FFFFFFF
    # Magnitude bits order as the magnitudes do, with Inf and then NaN above everything: the maximum keeps them.
    block_max = tl.max(magnitude, axis=2)
    block_exponent, block_mantissa = split_exponent(block_max)
    if macro:
        macro_max = tl.max(block_max, axis=1)
        _, mantissa = split_exponent(macro_max)
        amax = (mantissa | 0x3F800000).to(tl.float32, bitcast=True)
        target = tl.div_rn(tl.full(amax.shape, 6.0, tl.float32), amax)
        macro_byte = (target.to(tl.int32, bitcast=True) >> 15) & 0xFF
        macro_byte = tl.where((macro_max == 0) | (macro_max >= 0x7F800000), 0, macro_byte)
    else:
        macro_byte = tl.zeros([rows], tl.int32)
    factor = (0x3F800000 | (macro_byte << 15)).to(tl.float32, bitcast=True)

    # Rounding is monotonic, so the maximum of the rounded products is the product of the maximum.
    scaled_max = (block_mantissa | 0x3F800000).to(tl.float32, bitcast=True) * factor[:, None]
    scaled_exponent, scaled_mantissa = split_exponent(scaled_max.to(tl.int32, bitcast=True))
    step = scaled_exponent - 2 + (scaled_mantissa > threshold).to(tl.int32)
    exponent = tl.minimum(tl.maximum(block_exponent + step, -126), 127)

    # x * 2**-E in two steps: each factor is a normal float32 and no value that can round to a code above 0 is lost.
    first = (-block_exponent) >> 1
    second = -block_exponent - first
    value = magnitude.to(tl.float32, bitcast=True) * power_of_two(first)[:, :, None]
    value = value * power_of_two(second)[:, :, None]
    value = value * factor[:, None, None]
    value = value * power_of_two(block_exponent - exponent)[:, :, None]
    code = encode_magnitude(value) | ((bits >> 28) & 8)

    empty = (block_max == 0) | (block_max >= 0x7F800000)
    code = tl.where(empty[:, :, None], 0, code)
    scale_byte = tl.where(block_max == 0, 127, tl.where(block_max >= 0x7F800000, 255, exponent + 127))
    return tl.reshape(code, [rows, blocks * 32]), scale_byte, macro_byte
