"""FLOPs and bytes of attention with low-rank parts, counted; as a script, the table of the card.

Three ways: the base alone; the kernel, with the adapter's part; the same result with keys and values written out in
full by one fused pass each, read again by ordinary attention. A byte is counted once, whether caches serve it again
or not; a multiply-add is two FLOPs. Softmax is the same for all and left out.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Sizes of a causal attention whose S queries are the last of T tokens.

    Attributes:
        rows, heads, kv_heads, queries, tokens, head_dim: B, Hq, Hk, S, T, D.
        rank_k, rank_v: of the adapter on keys and on values, 0 for none.
        rotary: channels that are rotated.
        element: bytes of a number.
        block_m: rows (queries times query heads of a KV head) that share a rebuilt key.
        halves: whether a channel is rebuilt by one product, or by two, one of them with the rows of its partner.
    """

    rows: int
    heads: int
    kv_heads: int
    queries: int
    tokens: int
    head_dim: int
    rank_k: int
    rank_v: int
    rotary: int
    element: int = 2
    block_m: int = 16
    halves: bool = True

    @property
    def pairs(self) -> int:
        """Queries and tokens that they see, over all rows and query heads."""
        seen = self.queries * self.tokens - self.queries * (self.queries - 1) // 2
        return self.rows * self.heads * seen

    @property
    def rebuilt(self) -> int:
        """Keys that the kernel rebuilds, over all rows and KV heads: each block of rows those that it sees."""
        groups = self.heads // self.kv_heads
        seen = 0
        for first in range(0, self.queries * groups, self.block_m):
            last = min(first + self.block_m, self.queries * groups) - 1
            seen += self.tokens - self.queries + last // groups + 1
        return self.rows * self.kv_heads * seen


def plain(p: Problem) -> tuple[int, int]:
    """FLOPs and bytes of attention to the base alone."""
    base = 2 * p.rows * p.kv_heads * p.tokens * p.head_dim
    around = 2 * p.rows * p.heads * p.queries * p.head_dim
    return 4 * p.head_dim * p.pairs, (base + around) * p.element


def low_rank(p: Problem) -> tuple[int, int]:
    """FLOPs and bytes that the kernel adds to those of the base."""
    flops = 2 * p.rank_v * p.pairs + 2 * p.rank_v * p.head_dim * p.rows * p.heads * p.queries
    numbers = p.rank_v * (p.rows * p.tokens + p.kv_heads * p.head_dim)
    if p.rank_k:
        products = p.head_dim if p.halves else p.head_dim + p.rotary
        # A rotated channel takes two multiplications by cosine and sine and two additions, another one addition.
        flops += (2 * p.rank_k * products + 4 * p.rotary + (p.head_dim - p.rotary)) * p.rebuilt
        # Half a row of cosines and half a row of sines.
        numbers += p.rank_k * (p.rows * p.tokens + p.kv_heads * p.head_dim) + p.rows * p.tokens * p.rotary
    return flops, numbers * p.element


def materialised(p: Problem) -> tuple[int, int]:
    """FLOPs and bytes that keys and values written out in full add to those of the base."""
    full = p.rows * p.kv_heads * p.tokens * p.head_dim
    flops = numbers = 0
    for rank in (p.rank_k, p.rank_v):
        if rank:
            flops += (2 * rank + 1) * full
            # The base is read and the result written; attention then reads the result in place of the base.
            numbers += 2 * full + rank * (p.rows * p.tokens + p.kv_heads * p.head_dim)
    if p.rank_k:
        flops += 3 * p.rows * p.kv_heads * p.tokens * p.rotary
        numbers += p.rows * p.tokens * p.rotary
    return flops, numbers * p.element


LLAMA = {"rows": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "rank_k": 16, "rank_v": 16, "rotary": 128}
CASES = {
    "decode, T 32768": {"queries": 1, "tokens": 32768, "block_m": 16},
    "decode, T 32768, values alone": {"queries": 1, "tokens": 32768, "block_m": 16, "rank_k": 0},
    "256 queries, T 32768": {"queries": 256, "tokens": 32768, "block_m": 128},
    "prefill, T 4096": {"queries": 4096, "tokens": 4096, "block_m": 128},
}


def main() -> None:
    """Print the table of the card: an 8B Llama's attention in bf16, one row, adapters of rank 16."""
    print("| | base alone | kernel adds | written out adds |\n|---|---:|---:|---:|")
    for name, sizes in CASES.items():
        p = Problem(**{**LLAMA, **sizes})
        ways = [way(p) for way in (plain, low_rank, materialised)]
        print(f"| {name}: GFLOP | {' | '.join(f'{flops / 1e9:.3f}' for flops, _ in ways)} |")
        print(f"| MB | {' | '.join(f'{count / 1e6:.1f}' for _, count in ways)} |")


if __name__ == "__main__":
    main()
