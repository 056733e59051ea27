"""LoRA on packed weights through peft.

peft finds the layer of a custom base class through `LoraConfig._register_custom_module`, which it does not save with
the adapter: `prepare_lora_config` makes that call for a new adapter, `load_adapter` for a saved one.
"""

import os
import warnings
from typing import Any

import torch
from torch import nn

from hf_ext.extras import require

from .linear import MXFP4Linear
from .loading import is_transposed

require("peft", extra="adapters")

from peft import LoraConfig, PeftConfig, PeftModel, PeftType  # noqa: E402 - after the check that names the extra
from peft.tuners.lora import Linear as LoraLinear  # noqa: E402
from peft.tuners.tuners_utils import check_adapters_to_merge  # noqa: E402

__all__ = ["LoraMXFP4Linear", "load_adapter", "prepare_lora_config"]

# Initialisations that rewrite the base weight, which packed bytes would round at once, or that peft reads it for.
_DENSE_ONLY_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica", "orthogonal")


class LoraMXFP4Linear(LoraLinear):
    """peft's LoRA layer over an `MXFP4Linear`: the same forward pass, a merge that packs again.

    Variants that read the dense weight on each step (DoRA and others) and initialisations that read or rewrite it
    (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, MiCA, orthogonal) are refused.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any) -> None:
        self._unmerged: dict[str, torch.Tensor | None] | None = None
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # peft's own reading of an unknown class warns, once a layer.
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict:
        """Plain LoRA only."""
        return {(): None}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """As peft's, after refusing what needs a dense base weight.

        Raises:
            ValueError: for an initialisation that reads or rewrites the base weight.
        """
        init = config.init_lora_weights
        if isinstance(init, str) and init.lower().startswith(_DENSE_ONLY_INITS):
            raise ValueError(
                f"`init_lora_weights={init!r}` reads or rewrites the base weight, which is packed in MXFP4; use True "
                "or 'gaussian', or apply it to the dense model before quantising"
            )
        # Packed rows are outputs whatever the dense layer was (GPT-2's Conv1D stores the transpose).
        self.fan_in_fan_out = False
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight and pack the sum again, which rounds it: outputs change a little.

        The bytes from before the first merge are kept until `unmerge`, so that it restores them exactly. After
        `model.dequantize()` the base is dense, and the merge is peft's.

        Args:
            safe_merge: check the sum for NaNs and infinities (packing does so in any case).
            adapter_names: default the active ones.

        Raises:
            ValueError: if the sum is not finite; the layer is left as it was.
        """
        adapter_names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not adapter_names:
            return
        base = self.get_base_layer()
        if not isinstance(base, MXFP4Linear):
            self.fan_in_fan_out = is_transposed(base)
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        weight = base.dequantize(torch.float32)
        bias = None if base.bias is None else base.bias.detach().clone()
        for name in adapter_names:
            weight += self.get_delta_weight(name).to(weight)
            if self.lora_bias[name]:
                if bias is None:
                    raise RuntimeError("a LoRA with `lora_bias=True` cannot be merged: the base layer has no bias")
                bias += (self.lora_B[name].bias * self.scaling[name]).to(bias)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"the merged weight is not finite: adapter(s) {', '.join(adapter_names)} seem broken")
        warnings.warn(
            "merging LoRA into MXFP4 weights rounds the sum to 4 bits again, so outputs differ from the unmerged "
            "model's; for an exact merge dequantise the base first (model.dequantize())",
            stacklevel=2,
        )
        if self._unmerged is None:
            self._unmerged = base.packed_state()
        base.pack_(weight)
        if bias is not None:
            base.bias.copy_(bias)
        self.merged_adapters.extend(adapter_names)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the bytes from before the merge.

        Raises:
            RuntimeError: if the base was dequantised after the merge, so that it has no bytes to restore.
        """
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        if not isinstance(self.get_base_layer(), MXFP4Linear):
            if self._unmerged is not None:
                raise RuntimeError(
                    "the base was dequantised while adapters were merged into it, so they cannot be unmerged; unmerge "
                    "before model.dequantize()"
                )
            super().unmerge()
            return
        self.get_base_layer().load_packed_state(self._unmerged)
        self._unmerged = None
        self.merged_adapters.clear()


def prepare_lora_config(config: LoraConfig, model: nn.Module | None = None) -> LoraConfig:
    """Teach a `LoraConfig` the packed layers; call it before `get_peft_model` or `model.add_adapter`.

    Args:
        config: changed in place.
        model: the packed model; needed for ``target_modules="all-linear"``, which peft resolves by the class of the
            layers and so would miss the packed ones.

    Returns:
        The same config.

    Raises:
        ValueError: for "all-linear" without a model, a config that asks for DoRA or a method that extends LoRA, or
            `modules_to_save` that would train a packed layer.
    """
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(f"`config` must be a peft.LoraConfig, got {type(config).__name__}")
    for name, module in [] if model is None else model.named_modules():
        if isinstance(module, MXFP4Linear) and any(_matches(name, entry) for entry in config.modules_to_save or ()):
            raise ValueError(
                f"`modules_to_save` trains whole modules, and {name} is packed in MXFP4; name it in `target_modules`, "
                "or quantise with it in `modules_to_not_convert`"
            )
    if config.use_dora:
        raise ValueError("`use_dora=True` needs a dense base weight on each step; MXFP4 layers do not support it")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        if model is None:
            raise ValueError('`target_modules="all-linear"` needs the model: prepare_lora_config(config, model)')
        config.target_modules = {
            name
            for name, module in model.named_modules()
            if isinstance(module, MXFP4Linear) or _is_dense(model, module)
        }
    config._register_custom_module({MXFP4Linear: LoraMXFP4Linear})
    return config


def _matches(name: str, entry: str) -> bool:
    """Whether a module is, or is inside, one that ends with ``entry``, which is how peft reads `modules_to_save`."""
    return f".{entry}." in f".{name}."


def _is_dense(model: nn.Module, module: nn.Module) -> bool:
    return type(module) is nn.Linear and module is not model.get_output_embeddings()


def load_adapter(
    model: nn.Module,
    adapter: str | os.PathLike,
    adapter_name: str = "default",
    is_trainable: bool = False,
    **kwargs: Any,
) -> PeftModel:
    """Load a saved LoRA onto a packed model.

    Args:
        model: a packed `PreTrainedModel`, or the `PeftModel` around one, which then gets a further adapter.
        adapter: folder or Hub id of the adapter.
        adapter_name: its name in the model.
        is_trainable: whether to go on training it.
        kwargs: passed to peft.

    Returns:
        The `PeftModel`.

    Raises:
        ValueError: if the adapter is not a LoRA.
    """
    config = PeftConfig.from_pretrained(adapter)
    config.inference_mode = not is_trainable
    config = prepare_lora_config(config, model)
    if not isinstance(model, PeftModel):
        return PeftModel.from_pretrained(
            model, adapter, adapter_name=adapter_name, is_trainable=is_trainable, config=config, **kwargs
        )
    model.add_adapter(adapter_name, config)
    # The layers exist now, so peft does not need its own reading of the configuration, which lacks our class.
    model.load_adapter(adapter, adapter_name=adapter_name, is_trainable=is_trainable, **kwargs)
    return model
