"""Adapters that are made up: random ones, and ones that share half of their spaces."""

from collections.abc import Sequence

import torch

from hf_ext.benchmarks.ctm.methods import Factors

__all__ = ["half_shared_adapters", "random_adapters", "regauge"]

LAYER = "layer"


def random_adapters(rows: int, columns: int, count: int, rank: int, seed: int = 0) -> list[Factors]:
    """`count` adapters of one layer [rows, columns], normal factors, Frobenius norms of about 1."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows * columns * rank) ** 0.5
    return [
        {
            LAYER: (
                torch.randn(rank, columns, generator=generator) / size,
                torch.randn(rows, rank, generator=generator),
            )
        }
        for _ in range(count)
    ]


def half_shared_adapters(size: int, rank: int, norms: Sequence[float], seed: int) -> list[Factors]:
    """Adapters [size, size] whose column and row spaces have half of their dimensions in common.

    W_t = [U_0 U_t] D_t [V_0 V_t]^T with orthonormal columns, U_0 and V_0 [size, rank / 2] the same for all, and a
    normal D_t [rank, rank], scaled to the norm given.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    common = [normal(size, rank // 2) for _ in range(2)]
    found = []
    for norm in norms:
        left, right = (torch.linalg.qr(torch.cat([c, normal(size, rank - rank // 2)], 1)).Q for c in common)
        inner = normal(rank, rank)
        found.append({LAYER: (right.mT.contiguous(), left @ (inner * (norm / inner.norm())))})
    return found


def regauge(adapters: Sequence[Factors], seed: int) -> list[Factors]:
    """The same updates in other factors: B G and G^-1 A, with a G of its own for each adapter and layer.

    G is a random rotation times scales from 1/2 to 2: well conditioned, so that rounding is not what is measured.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for adapter in adapters:
        turned = {}
        for layer, (a, b) in adapter.items():
            rank = a.shape[0]
            turn = torch.linalg.qr(torch.randn(rank, rank, generator=generator)).Q
            scales = 4 ** (torch.rand(rank, generator=generator) - 0.5)
            turned[layer] = ((turn / scales).mT @ a, b @ (turn * scales))
        found.append(turned)
    return found
