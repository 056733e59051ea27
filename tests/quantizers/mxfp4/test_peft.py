"""LoRA on packed weights; the oracle is peft's own LoRA on the dequantised model."""

import copy
import warnings

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_ext import MXFP4Config, load_adapter, prepare_lora_config
from hf_ext.quantizers.mxfp4.peft import LoraMXFP4Linear

IDS = torch.randint(1, 256, (4, 24), generator=torch.Generator().manual_seed(0))
TARGETS = ["q_proj", "v_proj", "down_proj"]


def packed_model(folder, **arguments):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4Config(**arguments))


def lora(**arguments) -> LoraConfig:
    settings = {"r": 4, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return LoraConfig(**settings | arguments)


def packed_bytes(model) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items() if t.dtype == torch.uint8}


@pytest.fixture
def adapted(tiny_llama_dir):
    torch.manual_seed(0)
    return get_peft_model(packed_model(tiny_llama_dir), prepare_lora_config(lora()))


def test_forward_and_gradients_equal_pefts_on_the_dequantised_model(adapted):
    base = copy.deepcopy(adapted).unload().dequantize()
    dense = get_peft_model(base, lora())
    dense.load_state_dict({k: v for k, v in adapted.state_dict().items() if "lora_" in k}, strict=False)
    assert torch.equal(adapted(IDS).logits, dense(IDS).logits)
    for model in (adapted, dense):
        model(input_ids=IDS, labels=IDS).loss.backward()
    ours = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert ours and all("lora_" in name for name in ours)
    for name, parameter in dense.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_training_moves_only_the_adapter_and_lowers_the_loss(tiny_llama_dir):
    torch.manual_seed(0)
    config = prepare_lora_config(lora(init_lora_weights=True, r=8))
    model = get_peft_model(packed_model(tiny_llama_dir, activation="mxfp4"), config)
    before = packed_bytes(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(25):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    after = packed_bytes(model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_transformers_trainer_accepts_it(tiny_llama_dir, tmp_path):
    model = get_peft_model(packed_model(tiny_llama_dir), prepare_lora_config(lora(init_lora_weights=True)))
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_steps=2
    )
    result = Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert result.global_step == 2
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file()


def test_a_saved_adapter_loads_on_a_packed_base_and_beside_another(adapted, tiny_llama_dir, tmp_path):
    expected = adapted(IDS).logits
    adapted.save_pretrained(tmp_path / "a")
    model = load_adapter(packed_model(tiny_llama_dir), tmp_path / "a")
    assert isinstance(model, PeftModel) and torch.equal(model(IDS).logits, expected)
    assert not any(p.requires_grad for p in model.parameters())

    torch.manual_seed(9)
    other = get_peft_model(packed_model(tiny_llama_dir), prepare_lora_config(lora(r=2)))
    second = other(IDS).logits
    other.save_pretrained(tmp_path / "b")
    load_adapter(model, tmp_path / "b", adapter_name="second")
    model.set_adapter("second")
    assert torch.equal(model(IDS).logits, second)
    model.set_adapter("default")
    assert torch.equal(model(IDS).logits, expected)


def test_adapters_load_in_a_fresh_process_onto_a_packed_folder(adapted, tiny_llama_dir, tmp_path, fresh_python):
    packed_model(tiny_llama_dir).save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    code = f"""
import hf_ext, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "base")!r})
model = hf_ext.load_adapter(model, {str(tmp_path / "adapter")!r})
ids = torch.arange(1, 20)[None]
with torch.no_grad():
    print(model(ids).logits.double().sum().item())
"""
    with torch.no_grad():
        expected = adapted(torch.arange(1, 20)[None]).logits.double().sum().item()
    assert float(fresh_python(code).split()[-1]) == pytest.approx(expected, abs=1e-4)


def test_merging_warns_is_close_and_unmerging_restores_every_byte(adapted):
    before, unmerged = packed_bytes(adapted), adapted(IDS).logits
    with pytest.warns(UserWarning, match="rounds the sum to 4 bits again"):
        adapted.merge_adapter()
    merged = adapted(IDS).logits
    with adapted.disable_adapter():  # unmerges
        base = adapted(IDS).logits
    assert (merged - unmerged).norm() < 0.5 * (base - unmerged).norm()
    assert all(torch.equal(before[name], tensor) for name, tensor in packed_bytes(adapted).items())
    assert torch.equal(adapted(IDS).logits, unmerged)


def test_merge_and_unload_leaves_a_packed_model_that_saves(adapted, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = adapted.merge_and_unload(safe_merge=True)
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_all_linear_means_the_packed_layers(tiny_llama_dir):
    model = packed_model(tiny_llama_dir)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Unsupported layer type")  # peft's, of layers that it does not know
        adapted = get_peft_model(model, prepare_lora_config(lora(target_modules="all-linear"), model))
    wrapped = [name for name, module in adapted.named_modules() if isinstance(module, LoraMXFP4Linear)]
    assert len(wrapped) == 2 * 7
    with pytest.raises(ValueError, match="needs the model"):
        prepare_lora_config(lora(target_modules="all-linear"))


def test_gpt2_layers_take_adapters_too(tiny_gpt2_dir):
    config = prepare_lora_config(lora(target_modules=["c_attn"], fan_in_fan_out=True))
    model = get_peft_model(packed_model(tiny_gpt2_dir), config)
    unmerged = model(IDS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
    merged = model(IDS).logits
    with model.disable_adapter():
        base = model(IDS).logits
    assert (merged - unmerged).norm() < 0.5 * (base - unmerged).norm()


def test_what_needs_a_dense_weight_is_refused(tiny_llama_dir):
    with pytest.raises(ValueError, match="use_dora"):
        prepare_lora_config(lora(use_dora=True))
    with pytest.raises(ValueError, match="init_lora_weights='olora'.*rewrites the base weight"):
        get_peft_model(packed_model(tiny_llama_dir), prepare_lora_config(lora(init_lora_weights="olora")))
    with pytest.raises(ValueError, match="init_lora_weights='orthogonal'.*use True or 'gaussian'"):
        get_peft_model(packed_model(tiny_llama_dir), prepare_lora_config(lora(init_lora_weights="orthogonal")))
    with pytest.raises(ValueError, match="must be a peft.LoraConfig"):
        prepare_lora_config({"r": 4})
    with pytest.raises(ValueError, match="must be a peft.LoraConfig, got AdaLoraConfig"):
        prepare_lora_config(AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    for name in ("up_proj", "mlp"):
        with pytest.raises(ValueError, match="`modules_to_save`.*layers.0.mlp.* is packed in MXFP4"):
            prepare_lora_config(lora(modules_to_save=[name]), packed_model(tiny_llama_dir))
    prepare_lora_config(lora(modules_to_save=["lm_head"]), packed_model(tiny_llama_dir))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merging_after_dequantising_is_exact(family, tiny_llama_dir, tiny_gpt2_dir):
    folder, targets = (tiny_llama_dir, TARGETS) if family == "llama" else (tiny_gpt2_dir, ["c_attn", "c_proj"])
    adapted = get_peft_model(packed_model(folder), prepare_lora_config(lora(target_modules=list(targets))))
    unmerged = adapted(IDS).logits
    adapted.get_base_model().dequantize()
    adapted.merge_adapter()
    torch.testing.assert_close(adapted(IDS).logits, unmerged)
    adapted.unmerge_adapter()
    torch.testing.assert_close(adapted(IDS).logits, unmerged)
    merged = adapted.merge_and_unload()
    assert not any(isinstance(module, LoraMXFP4Linear) for module in merged.modules())
    torch.testing.assert_close(merged(IDS).logits, unmerged)


@pytest.mark.filterwarnings("ignore:merging LoRA")
def test_a_merge_before_dequantising_cannot_be_undone_and_says_so(adapted):
    adapted.merge_adapter()
    adapted.get_base_model().dequantize()
    with pytest.raises(RuntimeError, match="dequantised while adapters were merged.*unmerge before"):
        adapted.unmerge_adapter()


def test_a_broken_adapter_is_not_merged(adapted):
    before = packed_bytes(adapted)
    layer = next(module for module in adapted.modules() if isinstance(module, LoraMXFP4Linear))
    layer.lora_A["default"].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="the merged weight is not finite"):
        layer.merge()
    assert all(torch.equal(before[name], tensor) for name, tensor in packed_bytes(adapted).items())
