"""`quantize_checkpoint` against `from_pretrained(quantization_config=...)` + `save_pretrained`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.core_model_loading import Transpose, WeightConverter

from hf_ext import MXFP4Config, quantize_model
from hf_ext.quantizers.mxfp4 import checkpoint
from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint

TEXT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 40
MOE = {
    "mixtral": MixtralConfig(num_local_experts=4, num_experts_per_tok=2, intermediate_size=96),
    "qwen3_moe": Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, intermediate_size=96
    ),
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()
    }


def assert_same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def load_clean(folder: Path, **kwargs) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model


def by_transformers(src: Path, dst: Path, config: MXFP4Config, **kwargs) -> Path:
    AutoModelForCausalLM.from_pretrained(src, quantization_config=config, **kwargs).save_pretrained(dst)
    return dst


def copy(src: Path, dst: Path) -> Path:
    return Path(shutil.copytree(src, dst))


@pytest.fixture(scope="session")
def moe_dirs(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name, config in MOE.items():
        config.update(
            {
                "vocab_size": 256,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
            }
        )
        folders[name] = tmp_path_factory.mktemp("moe") / name
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


# -- the same as transformers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        MXFP4Config(),
        MXFP4Config(macro_block_size=64, weight_search="dynamic", search_exponents=True),
        MXFP4Config.paper(),
        MXFP4Config.ocp(),
    ],
    ids=["default", "dynamic", "paper", "ocp"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tensors_and_configuration_equal_those_of_save_pretrained(family, config, request, tmp_path):
    src = request.getfixturevalue(f"tiny_{family}_dir")
    report = quantize_checkpoint(src, tmp_path / "packed", config)
    reference = by_transformers(src, tmp_path / "reference", config)
    assert_same_tensors(tensors(tmp_path / "packed"), tensors(reference))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (report.path, reference))
    searches = [stored["quantization_config"].pop("weight_search") for stored in (ours, theirs)]
    assert searches[0] in (searches[1], "static")  # "auto" is stored as what it came to
    assert ours == theirs
    packed, dense = load_clean(report.path), load_clean(reference)
    assert_same_tensors(packed.state_dict(), dense.state_dict())
    assert not (tmp_path / "packed.partial").exists()


def test_report_agrees_with_the_files(tiny_llama_dir, tmp_path):
    report = quantize_checkpoint(tiny_llama_dir, tmp_path / "packed")
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors(report.path).items()}
    packed = {name: size for name, size in sizes.items() if tensors(report.path)[name].dtype == torch.uint8}
    assert sum(layer.packed_bytes for layer in report.layers) == sum(packed.values())
    assert report.dense_bytes == sum(sizes.values()) - sum(packed.values())
    dense = tensors(tiny_llama_dir)
    restored = load_clean(report.path, quantization_config=MXFP4Config(dequantize=True)).state_dict()
    names = [layer.name for layer in report.layers]
    error = sum((restored[name] - dense[name]).double().square().sum() for name in names)
    norm = sum(dense[name].double().square().sum() for name in names)
    assert report.relative_error == pytest.approx(float((error / norm).sqrt()), rel=1e-6)
    assert report.bits_per_weight == pytest.approx(
        8 * sum(packed.values()) / sum(dense[name].numel() for name in names)
    )
    assert set(report.by_kind()) == {name.replace(".0.", ".*.").replace(".1.", ".*.") for name in names}


@pytest.mark.parametrize("stored, asked", [(torch.bfloat16, None), (torch.float32, "bfloat16")])
def test_dtype_is_treated_as_by_from_pretrained(stored, asked, tiny_llama_dir, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=stored).save_pretrained(tmp_path / "src")
    quantize_checkpoint(tmp_path / "src", tmp_path / "packed", dtype=asked)
    kwargs = {} if asked is None else {"dtype": torch.bfloat16}
    reference = by_transformers(tmp_path / "src", tmp_path / "reference", MXFP4Config(), **kwargs)
    assert_same_tensors(tensors(tmp_path / "packed"), tensors(reference))
    assert load_clean(tmp_path / "packed").dtype == torch.bfloat16


def test_shards_of_source_and_result_do_not_change_the_tensors(tiny_llama_dir, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "src", max_shard_size="100KB")
    assert len(list((tmp_path / "src").glob("*.safetensors"))) > 2
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "packed", max_shard_size="40KB")
    assert report.shards == len(list(report.path.glob("*.safetensors"))) > 2
    whole = quantize_checkpoint(tiny_llama_dir, tmp_path / "whole")
    assert_same_tensors(tensors(report.path), tensors(whole.path))
    assert_same_tensors(load_clean(report.path).state_dict(), load_clean(whole.path).state_dict())
    index = json.loads((report.path / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(report.path / file)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors(whole.path).values())


def test_checkpoint_of_a_base_model_is_packed_under_the_names_of_the_whole(tiny_gpt2_dir, tmp_path):
    src = copy(tiny_gpt2_dir, tmp_path / "src")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors(src).items()}
    save_file(bare, src / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(src, tmp_path / "packed")
    reference = by_transformers(src, tmp_path / "reference", MXFP4Config())
    assert_same_tensors(tensors(tmp_path / "packed"), tensors(reference))
    load_clean(tmp_path / "packed")


@pytest.mark.parametrize("equal", [True, False])
def test_second_copy_of_a_tied_weight_is_dropped_only_if_equal(equal, tiny_gpt2_dir, tmp_path):
    src = copy(tiny_gpt2_dir, tmp_path / "src")
    state = tensors(src)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone() + (0 if equal else 1)
    save_file(state, src / "model.safetensors", metadata={"format": "pt"})
    report = quantize_checkpoint(src, tmp_path / "packed")
    assert report.dropped == (["lm_head.weight"] if equal else [])
    reference = by_transformers(src, tmp_path / "reference", MXFP4Config())
    assert_same_tensors(tensors(report.path), tensors(reference))


def test_keys_that_the_model_does_not_use_are_left_out_and_reported(tiny_llama_dir, tmp_path):
    src = copy(tiny_llama_dir, tmp_path / "src")
    save_file(tensors(src) | {"model.extra": torch.ones(3)}, src / "model.safetensors", metadata={"format": "pt"})
    report = quantize_checkpoint(src, tmp_path / "packed")
    assert report.dropped == ["model.extra"]
    load_clean(report.path)


def test_skip_adds_to_the_modules_left_dense_by_default(tiny_llama_dir, tmp_path):
    report = quantize_checkpoint(tiny_llama_dir, tmp_path / "packed", skip=["model.layers.0"])
    names = {layer.name for layer in report.layers}
    assert names and not any(".0." in name for name in names)
    assert "model.layers.0" in report.config.modules_to_not_convert
    assert "lm_head" in report.config.modules_to_not_convert
    load_clean(report.path)


def test_everything_but_the_weights_travels(tiny_llama_dir, tmp_path):
    src = copy(tiny_llama_dir, tmp_path / "src")
    (src / "chat_template.jinja").write_text("{{ messages }}")
    (src / "preprocessor_config.json").write_text("{}")
    (src / "README.md").write_text("---\nlicense: mit\n---\n# dense\n")
    (src / "tokenization_mine.py").write_text("# code that tokenizer_config.json may name\n")
    (src / "notes.bin").write_bytes(b"0")
    quantize_checkpoint(src, tmp_path / "packed")
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert names == ({path.name for path in src.iterdir()} - {"notes.bin"})
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "license: mit" in card and "import hf_ext" in card


# -- mixtures of experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MOE)
def test_experts_stored_one_by_one_are_packed_one_by_one(family, moe_dirs, tmp_path):
    src = moe_dirs[family]
    singles = [name for name in tensors(src) if ".experts.3." in name]
    assert singles  # the source has them one by one
    report = quantize_checkpoint(src, tmp_path / "packed", max_shard_size="30KB")
    assert {f"{name}_packed" for name in singles} <= set(tensors(report.path))
    direct = AutoModelForCausalLM.from_pretrained(src, quantization_config=MXFP4Config())
    loaded = load_clean(report.path)
    assert_same_tensors(loaded.state_dict(), direct.state_dict())
    ids = torch.arange(16)[None]
    assert torch.equal(loaded(ids).logits, direct(ids).logits)
    dense = load_clean(report.path, quantization_config=MXFP4Config(dequantize=True))
    assert_same_tensors(dense.state_dict(), direct.dequantize().state_dict())


def test_experts_left_dense_beside_packed_ones_load_packed_and_dequantised(moe_dirs, tmp_path):
    report = quantize_checkpoint(moe_dirs["mixtral"], tmp_path / "packed", skip=["model.layers.0.mlp.experts"])
    assert not any("layers.0" in layer.name and "experts" in layer.name for layer in report.layers)
    packed = load_clean(report.path)
    dense = load_clean(report.path, quantization_config=MXFP4Config(dequantize=True))
    assert_same_tensors(dense.state_dict(), packed.dequantize().state_dict())


def test_experts_with_calibration_equal_those_quantised_in_memory(moe_dirs, tmp_path):
    src, ids = moe_dirs["mixtral"], torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    report = quantize_checkpoint(src, tmp_path / "packed", calibration=ids)
    assert report.config.weight_search == "weighted"
    memory = quantize_model(AutoModelForCausalLM.from_pretrained(src), MXFP4Config(), calibration=ids)
    assert_same_tensors(load_clean(report.path).state_dict(), memory.state_dict())


def test_converter_that_does_more_than_stack_rows_is_refused_by_name(tiny_llama_dir, tmp_path, monkeypatch):
    from transformers import conversion_mapping

    real = conversion_mapping.get_checkpoint_conversion_mapping

    def mapping(name):
        if name != "llama":
            return real(name)
        return [WeightConverter("mlp.turned.weight", "mlp.up_proj.weight", [Transpose()])]

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", mapping)
    src = copy(tiny_llama_dir, tmp_path / "src")
    state = {name.replace("up_proj", "turned"): tensor for name, tensor in tensors(src).items()}
    save_file(state, src / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is made from .*turned.*Transpose"):
        quantize_checkpoint(src, tmp_path / "packed")
    assert not (tmp_path / "packed.partial").exists()


# -- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path) -> None:
    """A one-layer Llama with a tokenizer of two merges."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "a", "b", "c", "ab", "abc"])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "token_embd.weight": (6, 64),
        "output.weight": (6, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_is_quantised_as_transformers_reads_it(tmp_path):
    from transformers import AutoTokenizer, GgufConfig

    (tmp_path / "src").mkdir()
    write_gguf(tmp_path / "src" / "m.gguf")
    ids = torch.tensor([[1, 2, 3, 4, 5, 1, 2]])
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "packed", gguf_file="m.gguf", calibration=ids)
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path / "src", gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = quantize_model(dense, MXFP4Config(), calibration=ids)
    assert len(report.layers) == 7
    assert_same_tensors(load_clean(report.path).state_dict(), expected.state_dict())
    assert AutoTokenizer.from_pretrained(report.path)("abcab", add_special_tokens=False)["input_ids"] == [5, 4]
    fails(OSError, "bad.gguf", tmp_path / "src", tmp_path / "other", gguf_file="bad.gguf")


# -- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_gives_what_quantize_model_gives(tiny_llama_dir, tmp_path):
    from transformers import AutoTokenizer

    report = quantize_checkpoint(tiny_llama_dir, tmp_path / "packed", calibration=TEXT)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    quantize_model(model, MXFP4Config(), calibration=TEXT, tokenizer=AutoTokenizer.from_pretrained(tiny_llama_dir))
    assert_same_tensors(load_clean(report.path).state_dict(), model.state_dict())
    plain = quantize_checkpoint(tiny_llama_dir, tmp_path / "plain")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    assert not torch.equal(tensors(report.path)[name], tensors(plain.path)[name])


def test_stored_statistics_serve_as_channel_stats(tiny_llama_dir, tmp_path):
    first = quantize_checkpoint(tiny_llama_dir, tmp_path / "first", calibration=TEXT)
    config = MXFP4Config(channel_stats=str(first.path / "channel_stats.safetensors"))
    second = quantize_checkpoint(tiny_llama_dir, tmp_path / "second", config)
    assert_same_tensors(tensors(first.path), tensors(second.path))
    stored = json.loads((second.path / "config.json").read_text())["quantization_config"]
    assert "channel_stats" not in stored and stored["weight_search"] == "weighted"


# -- interruption -----------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint
quantize_checkpoint(sys.argv[1], sys.argv[2], max_shard_size="40KB", progress=lambda *_: time.sleep(0.05))
"""


def test_killed_run_leaves_only_the_partial_folder_and_is_resumed(tiny_llama_dir, tmp_path):
    dst = tmp_path / "killed" / "packed"
    dst.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tiny_llama_dir), str(dst)])
    partial = dst.with_name("packed.partial")
    deadline = time.monotonic() + 120
    while not list(partial.glob("model-00001-of-*.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name for path in dst.parent.iterdir()] == ["packed.partial"]
    assert not (partial / "config.json").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("model-*.safetensors")}

    report = quantize_checkpoint(tiny_llama_dir, dst, max_shard_size="40KB")
    assert 0 < report.resumed == len(finished) < report.shards
    assert [path.name for path in dst.parent.iterdir()] == ["packed"]
    for name, written in finished.items():
        assert (dst / name).stat().st_mtime_ns == written
    whole = quantize_checkpoint(tiny_llama_dir, tmp_path / "whole" / "packed", max_shard_size="40KB")
    assert report.layers == whole.layers
    files = {path.name for path in dst.iterdir()}
    assert files == {path.name for path in whole.path.iterdir()}
    for name in files:
        assert (dst / name).read_bytes() == (whole.path / name).read_bytes(), name


class Stop(Exception):
    pass


def stop_after_first_shard(dst: Path):
    def progress(*_):
        if list(dst.with_name(dst.name + ".partial").glob("model-*.safetensors")):
            raise Stop

    return progress


def test_unfinished_run_with_other_arguments_is_refused_until_overwrite(tiny_llama_dir, tmp_path):
    dst = tmp_path / "packed"
    with pytest.raises(Stop):
        quantize_checkpoint(tiny_llama_dir, dst, max_shard_size="40KB", progress=stop_after_first_shard(dst))
    with pytest.raises(FileExistsError, match="unfinished run with another"):
        quantize_checkpoint(tiny_llama_dir, dst, MXFP4Config(scale_rule="ceil"), max_shard_size="40KB")
    with pytest.raises(FileExistsError, match="unfinished run with another"):
        quantize_checkpoint(tiny_llama_dir, dst, max_shard_size="40KB", calibration=TEXT)
    other = copy(tiny_llama_dir, tmp_path / "other")
    os.utime(other / "model.safetensors", (0, 0))
    with pytest.raises(FileExistsError, match="unfinished run with another"):
        quantize_checkpoint(other, dst, max_shard_size="40KB")
    report = quantize_checkpoint(
        tiny_llama_dir, dst, MXFP4Config(scale_rule="ceil"), max_shard_size="40KB", overwrite=True
    )
    assert report.resumed == 0 and report.config.scale_rule == "ceil"


@pytest.mark.parametrize("overwrite", [True, False])
def test_second_run_at_the_same_time_is_refused_and_harms_nothing(overwrite, tiny_llama_dir, tmp_path):
    dst = tmp_path / "packed"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tiny_llama_dir), str(dst)])
    try:
        while not (dst.with_name("packed.partial") / ".quantize" / "state.json").is_file():
            assert process.poll() is None
            time.sleep(0.02)
        with pytest.raises(RuntimeError, match="packed.partial is being written by another process"):
            quantize_checkpoint(
                tiny_llama_dir, dst, MXFP4Config(block_size=16), max_shard_size="40KB", overwrite=overwrite
            )
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert load_clean(dst).config.quantization_config.block_size == 32
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_destination_that_fills_while_the_run_lasts_is_kept(tiny_llama_dir, tmp_path):
    dst = tmp_path / "packed"

    def fill(*_):
        dst.mkdir(exist_ok=True)
        (dst / "mine.txt").write_text("mine")

    with pytest.raises(
        FileExistsError, match="filled in the meantime; the finished checkpoint is in .*packed.partial"
    ):
        quantize_checkpoint(tiny_llama_dir, dst, progress=fill)
    assert [path.name for path in dst.iterdir()] == ["mine.txt"]


def test_resumed_run_does_not_calibrate_again(tiny_llama_dir, tmp_path, monkeypatch):
    dst = tmp_path / "packed"
    arguments = {"max_shard_size": "40KB", "calibration": TEXT}
    with pytest.raises(Stop):
        quantize_checkpoint(tiny_llama_dir, dst, **arguments, progress=stop_after_first_shard(dst))
    monkeypatch.setattr(checkpoint, "collect_channel_stats", lambda *_, **__: pytest.fail("calibrated again"))
    report = quantize_checkpoint(tiny_llama_dir, dst, **arguments)
    monkeypatch.undo()
    whole = quantize_checkpoint(tiny_llama_dir, tmp_path / "whole", **arguments)
    assert report.resumed > 0
    assert_same_tensors(tensors(report.path), tensors(whole.path))


# -- the destination --------------------------------------------------------------------------------------------------


def test_full_destination_is_kept_without_overwrite_and_replaced_with_it(tiny_llama_dir, tmp_path):
    dst = tmp_path / "packed"
    dst.mkdir()
    (dst / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty.*--overwrite"):
        quantize_checkpoint(tiny_llama_dir, dst)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    assert (dst / "mine.txt").read_text() == "mine"
    with pytest.raises(Stop):  # an old result stays until the new one is complete
        quantize_checkpoint(
            tiny_llama_dir, dst, overwrite=True, max_shard_size="40KB", progress=stop_after_first_shard(dst)
        )
    assert (dst / "mine.txt").exists()
    quantize_checkpoint(tiny_llama_dir, dst, overwrite=True, max_shard_size="40KB")
    assert not (dst / "mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    load_clean(dst)


def test_empty_destination_is_used(tiny_llama_dir, tmp_path):
    (tmp_path / "packed").mkdir()
    load_clean(quantize_checkpoint(tiny_llama_dir, tmp_path / "packed").path)


def test_a_folder_beside_the_destination_is_left_alone(tiny_llama_dir, tmp_path):
    for name in ("packed", "packed.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    quantize_checkpoint(tiny_llama_dir, tmp_path / "packed", overwrite=True)
    assert (tmp_path / "packed.old" / "mine.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "packed.old"]


def test_a_file_in_the_place_of_the_partial_folder_goes_with_overwrite(tiny_llama_dir, tmp_path):
    (tmp_path / "packed.partial").write_text("")
    with pytest.raises(FileExistsError, match="--overwrite"):
        quantize_checkpoint(tiny_llama_dir, tmp_path / "packed")
    load_clean(quantize_checkpoint(tiny_llama_dir, tmp_path / "packed", overwrite=True).path)


def test_a_link_as_destination_is_followed(tiny_llama_dir, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "packed").symlink_to(tmp_path / "disk")
    quantize_checkpoint(tiny_llama_dir, tmp_path / "packed")
    assert (tmp_path / "packed").is_symlink()
    load_clean(tmp_path / "disk")


@pytest.mark.parametrize("where", ["src", "."])
def test_source_is_never_overwritten(where, tiny_llama_dir, tmp_path):
    src = copy(tiny_llama_dir, tmp_path / "src")
    with pytest.raises(ValueError, match="contains, the source"):
        quantize_checkpoint(src, tmp_path / where, overwrite=True)
    load_clean(src)


# -- bad input --------------------------------------------------------------------------------------------------------


def fails(error, match: str, src, tmp_path: Path, *args, started: bool = False, **kwargs) -> None:
    with pytest.raises(error, match=match) as caught:
        quantize_checkpoint(src, tmp_path / "packed", *args, **kwargs)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "packed").exists()
    assert (tmp_path / "packed.partial").exists() == started


def test_source_that_does_not_exist_is_named(tmp_path):
    fails(FileNotFoundError, "no-such-folder does not exist", "no-such-folder", tmp_path)
    fails(FileNotFoundError, "neither a folder nor a model", "nobody/nothing", tmp_path)


def test_folder_that_is_no_checkpoint_is_refused(tiny_llama_dir, tmp_path):
    (tmp_path / "empty").mkdir()
    fails(ValueError, "no config.json", tmp_path / "empty", tmp_path)
    (tmp_path / "empty" / "m.gguf").touch()
    fails(ValueError, "gguf_file='m.gguf'", tmp_path / "empty", tmp_path)
    src = copy(tiny_llama_dir, tmp_path / "src")
    (src / "model.safetensors").rename(src / "pytorch_model.bin")
    fails(ValueError, r"no safetensors weights.*pytorch_model\.bin", src, tmp_path)


def test_quantised_source_is_refused(tiny_llama_dir, tmp_path):
    quantize_checkpoint(tiny_llama_dir, tmp_path / "once")
    fails(ValueError, "quantised already.*hf_ext_mxfp4", tmp_path / "once", tmp_path)


def test_truncated_file_is_named(tiny_llama_dir, tmp_path):
    src = copy(tiny_llama_dir, tmp_path / "src")
    os.truncate(src / "model.safetensors", (src / "model.safetensors").stat().st_size - 100)
    fails(OSError, r"model\.safetensors is not a complete safetensors file", src, tmp_path)


def test_missing_shard_is_named(tiny_llama_dir, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "src", max_shard_size="100KB")
    gone = sorted((tmp_path / "src").glob("*.safetensors"))[1]
    gone.unlink()
    fails(FileNotFoundError, gone.name, tmp_path / "src", tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named(value, tiny_llama_dir, tmp_path):
    src = copy(tiny_llama_dir, tmp_path / "src")
    state = tensors(src)
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(state, src / "model.safetensors", metadata={"format": "pt"})
    fails(ValueError, r"model\.layers\.1\.mlp\.up_proj\.weight: .*NaN or infinite", src, tmp_path, started=True)


def test_configuration_and_index_of_the_wrong_kind_are_refused(tiny_llama_dir, tmp_path):
    src = copy(tiny_llama_dir, tmp_path / "src")
    raw = json.loads((src / "config.json").read_text())
    for architecture, match in (("logging", "has no class 'logging'"), ("BertForMaskedLM", "no model of a LlamaConf")):
        (src / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
        fails(ValueError, match, src, tmp_path)
    (src / "config.json").write_text("[]")
    fails(ValueError, "is not a model's configuration: it holds a list", src, tmp_path)
    (src / "config.json").write_text(json.dumps(raw))
    (src / "model.safetensors").unlink()
    (src / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 3}}')
    fails(ValueError, "is not an index of safetensors shards", src, tmp_path)


def test_missing_and_misshapen_weights_are_named(tiny_llama_dir, tmp_path):
    src, name = copy(tiny_llama_dir, tmp_path / "src"), "model.layers.1.mlp.up_proj.weight"
    state = tensors(src)
    weight = state.pop(name)
    save_file(state, src / "model.safetensors", metadata={"format": "pt"})
    fails(ValueError, f"{name} is not in ", src, tmp_path)
    save_file(state | {name: weight[:-1].clone()}, src / "model.safetensors", metadata={"format": "pt"})
    fails(ValueError, rf"{name} has shape \(95, 64\).*\(96, 64\)", src, tmp_path)


def test_missing_expert_is_named(moe_dirs, tmp_path):
    src = copy(moe_dirs["mixtral"], tmp_path / "src")
    state = tensors(src)
    del state[next(name for name in state if ".experts.2.w2." in name)]
    save_file(state, src / "model.safetensors", metadata={"format": "pt"})
    fails(ValueError, r"experts\.down_proj is incomplete", src, tmp_path)


def test_full_disk_is_told_before_and_during_work(tiny_llama_dir, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        fails(OSError, "not enough space", tiny_llama_dir, tmp_path)

    def full(*_, **__):  # as safetensors says it
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        fails(OSError, "no space left.*goes on", tiny_llama_dir, tmp_path, started=True)
    load_clean(quantize_checkpoint(tiny_llama_dir, tmp_path / "packed").path)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"format": "gptq"}, "`format` must be one of"),
        ({"format": "compressed-tensors"}, "no macro-block scale; re-quantise with macro_block_size=None"),
        ({"skip": ["model.nothing"]}, "`skip` names no module.*model.nothing"),
        ({"skip": [""]}, "`skip` names no module"),
        ({"skip": ["*q_proj"]}, "`skip`: .*is not a regular expression"),
        ({"max_shard_size": "large"}, "`max_shard_size`.*large"),
        ({"max_shard_size": 0}, "`max_shard_size`"),
        ({"max_shard_size": 1e6}, "`max_shard_size`.*1000000.0"),
        ({"dtype": "int8"}, "`dtype` must be a float dtype.*int8"),
        ({"config": MXFP4Config(weight_search="weighted")}, "needs the inputs' statistics"),
        ({"config": MXFP4Config(weight_search="static"), "calibration": TEXT}, "`calibration` is only used by"),
        ({"config": MXFP4Config(dequantize=True)}, "dequantize=True"),
        ({"calibration": TEXT, "calibration_windows": 0}, "at least 1"),
    ],
)
def test_argument_that_does_not_fit_is_named(arguments, match, tiny_llama_dir, tmp_path):
    config = arguments.pop("config", None) if "config" in arguments else None
    fails(ValueError, match, tiny_llama_dir, tmp_path, config, **arguments)


# -- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
quantize_checkpoint(sys.argv[1], sys.argv[3] + "-warm")
before = peak()
quantize_checkpoint(sys.argv[2], sys.argv[3], max_shard_size="4MB")
print(peak() - before)
"""


def test_memory_holds_a_shard_and_a_weight_and_not_the_model(tiny_llama_dir, tmp_path):
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "src")
    size = (tmp_path / "src" / "model.safetensors").stat().st_size
    arguments = [str(tiny_llama_dir), str(tmp_path / "src"), str(tmp_path / "packed")]
    out = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True).stdout
    assert size > 100e6
    assert int(out) < 0.5 * size
