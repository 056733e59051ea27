"""The links themselves: pure functions and the module that holds their weights. No model, no cache.

Shapes: `S` distinct source layers, `B` sequences, `n` tokens, `d` the width of the model, `r` the rank.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init


def normalise(states: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each state by its root mean square; no learned scale.

    Residual norms grow by one to two orders of magnitude with depth, so a raw upper state would drown a lower one. A
    state of zeros (padding, or what lies before the first token) stays zero: its link adds nothing.

    Args:
        states: `[..., d]`, any float type.
        eps: Added to the mean of the squares; the model's `rms_norm_eps`.

    Returns:
        `[..., d]` in float32, or float64 when that came in.
    """
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def shift(states: torch.Tensor, group_size: int) -> torch.Tensor:
    """States of the token `group_size` places before each one; zeros where there is none.

    Args:
        states: `[S, B, n, d]`.
        group_size: `g`, at least 1.

    Returns:
        `[S, B, n, d]`: entry `t` is the state of token `t - g`.
    """
    return F.pad(states, (0, 0, group_size, 0))[:, :, : states.shape[2]]


class LinksInto(nn.Module):
    """All links into one target layer: their sum is one matrix product over the concatenated states.

    Args:
        rows: Places of the sources among the `S` states that `forward` is given.
        hidden_size: `d`.
        rank: `r`, or None for full matrices.
        gate: `"none"`, `"scalar"` or `"input"`.

    Attributes:
        weight: `[d, S' d]`, full: `U` of each of the `S'` sources side by side. Starts at zero.
        down: `[S' r, d]`, low rank: `A` of each source. Starts at normal(0, 1/sqrt(d)).
        up: `[d, S' r]`, low rank: `B` of each source. Starts at zero.
        gate: `[S']`, scalar gates: starts at 1.
        gate_weight: `[S', d]`, input gates: starts at 0.
        gate_bias: `[S']`, input gates: starts at 2, so that a gate starts at sigmoid(2) = 0.88.
    """

    def __init__(self, rows: list[int], hidden_size: int, rank: int | None, gate: str) -> None:
        super().__init__()
        self.rows, self.rank, self.kind = rows, rank, gate
        number = len(rows)
        if rank is None:
            self.weight = nn.Parameter(torch.empty(hidden_size, number * hidden_size))
        else:
            self.down = nn.Parameter(torch.empty(number * rank, hidden_size))
            self.up = nn.Parameter(torch.empty(hidden_size, number * rank))
        if gate == "scalar":
            self.gate = nn.Parameter(torch.empty(number))
        elif gate == "input":
            self.gate_weight = nn.Parameter(torch.empty(number, hidden_size))
            self.gate_bias = nn.Parameter(torch.empty(number))

    @property
    def last(self) -> torch.Tensor:
        """The weight that is applied last: `weight`, or `up` of low rank."""
        return self.weight if self.rank is None else self.up

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the weights to where they start, but for those that a checkpoint has filled: links that add nothing."""
        for name, parameter in self.named_parameters(recurse=False):
            if name == "down":
                init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
            elif name == "gate":
                init.ones_(parameter)
            elif name == "gate_bias":
                init.constant_(parameter, 2.0)
            else:
                init.zeros_(parameter)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """What the links add to the target layer's input.

        Args:
            states: `[S, B, n, d]`, normalised, in the weights' type; brought to their device here, as the hooks that
                offload weights put them there just before this call.

        Returns:
            `[B, n, d]`: the sum over the sources of `alpha * U x`.
        """
        states = states.to(self.last.device)
        if len(self.rows) == 1:
            chosen = states[self.rows[0] : self.rows[0] + 1]
        else:
            chosen = states if len(self.rows) == states.shape[0] else states[self.rows]
        if self.kind == "scalar":
            chosen = chosen * self.gate[:, None, None, None]
        elif self.kind == "input":
            score = (chosen * self.gate_weight[:, None, None]).sum(-1) + self.gate_bias[:, None, None]
            chosen = chosen * torch.sigmoid(score)[..., None]
        if len(self.rows) == 1:
            flat = chosen[0]
            return F.linear(flat, self.weight) if self.rank is None else F.linear(F.linear(flat, self.down), self.up)
        if self.rank is not None:
            number, batch, length, width = chosen.shape
            down = self.down.view(number, self.rank, width).transpose(1, 2)
            chosen = torch.matmul(chosen.reshape(number, batch * length, width), down)
            chosen = chosen.view(number, batch, length, self.rank)
        flat = chosen.permute(1, 2, 0, 3).flatten(2)
        return F.linear(flat, self.last)


class TurboLinks(nn.Module):
    """The links of a model. One call gives what is added to every target layer of a chunk of tokens.

    A module with a `forward`, not a `ModuleDict`: peft's `modules_to_save` wraps it as a whole and redirects `forward`
    to its own copy.

    Args:
        pairs: The links as (source, target) layer indices.
        hidden_size: `d`.
        rank: Rank of each matrix, or None for full ones.
        gate: `"none"`, `"scalar"` or `"input"`.
        eps: Of the normalisation.
    """

    def __init__(
        self, pairs: list[tuple[int, int]], hidden_size: int, rank: int | None, gate: str, eps: float
    ) -> None:
        super().__init__()
        self.eps = eps
        sources, targets = source_layers(pairs), target_layers(pairs)
        for target in targets:
            rows = [sources.index(source) for source, into in pairs if into == target]
            self.add_module(f"into_{target}", LinksInto(rows, hidden_size, rank, gate))

    def forward(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> list[torch.Tensor]:
        """What the links add to each target layer, in the order of the targets.

        Args:
            states: `[S, B, n, d]`: for each token what each source layer wrote `group_size` tokens before.
            valid: `[B or 1, n]`, True where that token is in the same document; None: everywhere.

        Returns:
            A tensor `[B, n, d]` per target layer, in the weights' type.
        """
        states = normalise(states, self.eps)
        if valid is not None:
            states = states * valid[None, ..., None]
        links = list(self._modules.values())
        states = states.to(links[0].last.dtype)
        return [link(states) for link in links]


def source_layers(pairs: list[tuple[int, int]]) -> list[int]:
    """Distinct source layers of (source, target) pairs, ascending."""
    return sorted({source for source, _ in pairs})


def target_layers(pairs: list[tuple[int, int]]) -> list[int]:
    """Distinct target layers of (source, target) pairs, ascending."""
    return sorted({target for _, target in pairs})
