"""What holds for every model patch, over all of them: see CONTRIBUTING.md, `model_patches/X`.

A patch adds a row to `PATCHES`; the tests of what is its own are in its folder.
"""

import copy
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments

from hf_ext.registry import list_methods


@dataclass(frozen=True)
class Patch:
    """A row of the table.

    Attributes:
        name: Of the folder in `model_patches/`.
        config: Its dataclass of settings.
        neutral: Settings under which a freshly patched model is its base.
        bitwise: Whether that holds bit for bit; else the reason why the arithmetic is cut differently.
        learns: Part of the names of the parameters that the patch brings and training must move.
        disturb: Makes a patched model differ from its base.
        peft: Arguments of `LoraConfig` that train the patch beside LoRA.
        exclusive: Whether a saved model must not load without `trust_remote_code`.
    """

    name: str
    config: str
    neutral: dict[str, Any] = field(default_factory=dict)
    bitwise: bool = True
    learns: str = ""
    disturb: Callable[[Any], None] = lambda model: None
    peft: dict[str, Any] = field(default_factory=dict)
    exclusive: bool = True

    @property
    def module(self) -> Any:
        """The method's package."""
        return importlib.import_module(f"hf_ext.model_patches.{self.name}")

    def settings(self, **fields: Any) -> Any:
        """Its dataclass, neutral but for `fields`."""
        return getattr(self.module, self.config)(**{**self.neutral, **fields})


def _fill_links(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "turbo_links" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


PATCHES = [
    Patch(
        name="turboconn",
        config="TurboConnConfig",
        neutral={"group_size": 16},  # more than the prompts have: one chunk, so the same arithmetic
        learns="turbo_links",
        disturb=_fill_links,
        peft={"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["turbo_links"]},
    ),
    Patch(
        name="turboconn",
        config="TurboConnConfig",
        bitwise=False,  # token by token: attention sums in another order
        learns="turbo_links",
        disturb=_fill_links,
        peft={"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["turbo_links"]},
    ),
]
IDS = ["turboconn", "turboconn-recurrent"]
ROUNDING = 2e-6


@pytest.fixture(params=PATCHES, ids=IDS)
def row(request) -> Patch:
    """Every patch in turn."""
    return request.param


@pytest.fixture
def base(tiny_llama_dir) -> Any:
    """A tiny Llama in float32 with eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        tiny_llama_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two rows of 12 tokens."""
    return torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(0))


def test_every_patch_that_is_here_is_in_the_table():
    assert {patch.name for patch in PATCHES} == {method.name for method in list_methods("model_patches", "available")}


def test_every_patch_has_its_command():
    from hf_ext.model_patches.cli import PATCHES as commands

    assert {patch.name for patch in PATCHES} == set(commands)


# --- a neutral patch is the base -----------------------------------------------------------------------------------


def test_a_neutral_patch_keeps_logits_weights_and_texts(row, base, tokens):
    patched = row.module.patch(copy.deepcopy(base), row.settings())
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    with torch.no_grad():
        expected, found = base(tokens).logits, patched(tokens).logits
        assert torch.equal(found, expected) if row.bitwise else (found - expected).abs().max() < ROUNDING
        for more in ({}, {"num_beams": 3}, {"use_cache": False}, {"num_beams": 2, "num_return_sequences": 2}):
            assert torch.equal(patched.generate(tokens, **options, **more), base.generate(tokens, **options, **more))
        # A cache that the first call filled is continued.
        parts, cache = [], DynamicCache(config=patched.config)
        for part in tokens.split([7, 5], dim=1):
            parts.append(patched(part, cache=cache, use_cache=True).logits)
        assert (torch.cat(parts, dim=1) - expected).abs().max() < ROUNDING


def test_patch_works_in_place_and_shares_the_weights(row, base):
    weights = {name: parameter.data_ptr() for name, parameter in base.named_parameters()}
    layers = base.model.layers
    assert row.module.patch(base, row.settings()) is base and base.model.layers is layers
    after = {name: parameter.data_ptr() for name, parameter in base.named_parameters()}
    assert weights.items() <= after.items()


def test_unpatch_gives_the_base_back(row, base, tokens):
    with torch.no_grad():
        tokens = tokens.repeat(1, 2)  # longer than a group
        expected = base(tokens).logits
        names, classes = list(base.state_dict()), (type(base), type(base.config))
        row.module.patch(base, row.settings())
        row.disturb(base)
        assert (base(tokens).logits - expected).abs().max() > 1e-3
        row.module.unpatch(base)
        assert torch.equal(base(tokens).logits, expected)
    assert list(base.state_dict()) == names and (type(base), type(base.config)) == classes


def test_a_patched_model_is_not_patched_twice(row, base):
    row.module.patch(base, row.settings())
    with pytest.raises(ValueError, match="already"):
        row.module.patch(base, row.settings())


def test_a_models_class_ends_in_its_bases_name(row, base):
    # The library finds the loss, and how labels are counted, by the name of the class.
    name = type(base).__name__
    row.module.patch(base, row.settings())
    assert type(base).__name__.endswith(name) and base.loss_function.__name__ == "ForCausalLMLoss"


# --- saved ---------------------------------------------------------------------------------------------------------


def test_saved_weights_and_code_load_again(row, base, tokens, tmp_path):
    row.module.patch(base, row.settings())
    row.disturb(base)
    base.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors")) and list(tmp_path.glob("modeling_*.py"))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, trust_remote_code=True, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert "transformers_modules" in type(loaded).__module__
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, base(tokens).logits)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "AutoModelForCausalLM" in written["auto_map"]
    if row.exclusive:
        assert written["model_type"] not in ("llama",) and "AutoConfig" in written["auto_map"]


def test_files_that_travel_are_flat_and_need_torch_and_transformers_only(row):
    folder = Path(row.module.__file__).parent
    from transformers.dynamic_module_utils import get_imports, get_relative_import_files

    for main in folder.glob("modeling_*.py"):
        for file in (main, *map(Path, get_relative_import_files(main))):
            assert file.parent == folder and file.is_file()
            assert set(get_imports(file)) - set(sys.stdlib_module_names) <= {"torch", "transformers"}


# --- trained -------------------------------------------------------------------------------------------------------


def moved(row: Patch, before: dict[str, torch.Tensor], model: Any) -> bool:
    after = {name: p for name, p in model.named_parameters() if row.learns in name}
    return bool(after) and any(not torch.equal(before[name], p) for name, p in after.items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_what_the_patch_brought_with_and_without_checkpointing(
    row, checkpointing, base, tokens, tmp_path
):
    row.module.patch(base, row.settings())
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        max_steps=2,
        learning_rate=1e-2,
        activation_checkpointing=checkpointing,
        disable_tqdm=True,
    )
    rows = [{"input_ids": ids.repeat(2), "labels": ids.repeat(2)} for ids in tokens]  # longer than a group
    Trainer(base, arguments, train_dataset=rows).train()
    assert moved(row, before, base)


def test_bf16_weights_give_finite_gradients(row, base, tokens):
    row.module.patch(base.to(torch.bfloat16), row.settings()).train()
    tokens = tokens.repeat(1, 2)
    base(tokens, labels=tokens).loss.backward()
    grads = [p.grad for name, p in base.named_parameters() if row.learns in name and p.grad is not None]
    assert grads and all(grad.dtype == torch.bfloat16 and torch.isfinite(grad).all() for grad in grads)
    assert max(grad.abs().max() for grad in grads) > 0


def test_peft_trains_saves_and_loads_the_patch_beside_lora(row, base, tokens, tmp_path):
    peft = pytest.importorskip("peft")
    row.module.patch(base, row.settings())
    plain, tokens = copy.deepcopy(base), tokens.repeat(1, 2)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **row.peft)).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert moved(row, before, model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_embeddings_are_resized_and_stay_tied(row, base, tokens):
    base.config.tie_word_embeddings = True
    base.tie_weights()
    row.module.patch(base, row.settings())
    row.disturb(base)
    with torch.no_grad():
        expected = base(tokens).logits
        base.resize_token_embeddings(260)
        assert torch.equal(base(tokens).logits[..., :256], expected)
    assert base.lm_head.weight is base.model.embed_tokens.weight


_WORKER = """
import importlib, os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
name, config, folder = sys.argv[1:4]
dist.init_process_group("gloo")
assert dist.get_world_size() == 2
torch.set_num_threads(1)
module = importlib.import_module(f"hf_ext.model_patches.{name}")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
module.patch(model, getattr(module, config)())
rank = dist.get_rank()
tokens = torch.randint(3, 256, (4, 10), generator=torch.Generator().manual_seed(0))
wrapped = DistributedDataParallel(model.train())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    rows = tokens[2 * rank : 2 * rank + 2]
    wrapped(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    torch.save({name: p.detach() for name, p in model.named_parameters()}, sys.argv[4])
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("row", PATCHES[1:], ids=IDS[1:], indirect=True)
def test_two_processes_take_the_steps_of_one(row, base, tiny_llama_dir, tmp_path):
    (tmp_path / "worker.py").write_text(_WORKER)
    out = tmp_path / "weights.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--standalone", str(tmp_path / "worker.py"), row.name, row.config, str(tiny_llama_dir), str(out)]
    done = subprocess.run(command, env={**os.environ, "ACCELERATE_USE_CPU": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(out)

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    row.module.patch(model, getattr(row.module, row.config)()).train()
    tokens = torch.randint(3, 256, (4, 10), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(row.learns in name and p.abs().max() > 0 for name, p in model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter).abs().max() < 1e-5, name
