"""Publishing: what is refused, what a dry run lists, and what a fake Hub receives."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import load_file, save_file

from hf_ext.publishing import BACKENDS, kind_of, publish_kernel, publish_model, write_kernel_variants

CARD = "---\nlibrary_name: transformers\ntags: [hf-ext, mxfp4]\nbase_model: org/base\n---\n# Model\n"


class FakeHub:
    """Stands for `HfApi`: applies the library's own pattern matching and keeps what would arrive on each branch."""

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.created, self.branches, self.contents = [], ["main"], {}

    def create_repo(self, repo_id, *, repo_type, private, exist_ok):
        if self.error:
            raise self.error
        self.created.append((repo_id, repo_type, private, exist_ok))
        return f"https://hub.test/{repo_id}"

    def create_branch(self, repo_id, *, branch, repo_type, exist_ok):
        self.branches.append(branch)

    def upload_folder(self, *, repo_id, repo_type, folder_path, revision, allow_patterns, delete_patterns, **rest):
        assert revision in self.branches
        names = [p.relative_to(folder_path).as_posix() for p in Path(folder_path).rglob("*") if p.is_file()]
        kept = filter_repo_objects(names, allow_patterns=allow_patterns)
        self.contents[revision] = {name: (Path(folder_path) / name).read_bytes() for name in kept}


def write_model(folder: Path, *, shards: int = 1, config: dict | None = None, card: str = CARD) -> Path:
    """A packed checkpoint of two layers, without torch."""
    folder.mkdir(parents=True)
    quantization = {"quant_method": "hf_ext_mxfp4", "macro_block_size": 128}
    (folder / "config.json").write_text(json.dumps(config or {"quantization_config": quantization}))
    (folder / "README.md").write_text(card)
    layers = []
    for i in range(2):
        parts = {"packed": (4, 64), "scale": (4, 4), "mbs": (4, 1)}
        layers.append({f"layers.{i}.weight_{part}": np.full(shape, i, np.uint8) for part, shape in parts.items()})
    if shards == 1:
        save_file(layers[0] | layers[1], folder / "model.safetensors")
        return folder
    weight_map = {}
    for i, layer in enumerate(layers, start=1):
        save_file(layer, folder / f"model-{i:05}-of-00002.safetensors")
        weight_map |= dict.fromkeys(layer, f"model-{i:05}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    folder = tmp_path / "toy_kernel"
    variant = folder / "build" / "torch-universal"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text('__all__ = ["double"]\n\n\ndef double(x):\n    return 2 * x\n')
    metadata = {"id": "_toy_3", "name": "toy-kernel", "version": 3, "license": "Apache-2.0", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cuda"}}))
    (folder / "build.toml").write_text(
        '[general]\nname = "toy-kernel"\nversion = 3\nlicense = "Apache-2.0"\nedition = 5\nbackends = ["cuda"]\n\n'
        '[general.hub]\nrepo-id = "me/toy"\n\n[torch-noarch]\n'
    )
    (folder / "README.md").write_text("---\nlibrary_name: kernels\nlicense: apache-2.0\ntags:\n- triton\n---\n# Toy\n")
    return folder


def drop(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k not in names}, folder / "model.safetensors")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# --- models --------------------------------------------------------------------------------------------------------


def test_an_adapter_passes_and_needs_its_base_model_named(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"base_model.model.x.lora_A.weight": np.zeros((2, 4), np.float32)}, folder / "adapter_model.safetensors")
    (folder / "README.md").write_text("---\nlibrary_name: peft\ntags: [lora]\nbase_model: org/base\n---\n# Adapter\n")
    assert kind_of(folder) == "model"
    assert set(publish_model(folder, dry_run=True).files) == {path.name for path in folder.iterdir()}
    (folder / "README.md").write_text("---\nlibrary_name: peft\ntags: [lora]\n---\n# Adapter\n")
    with pytest.raises(ValueError, match="README.md lacks base_model"):
        publish_model(folder, dry_run=True)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_dry_run_lists_exactly_the_files_and_sizes_that_a_push_uploads(tmp_path, shards):
    folder = write_model(tmp_path / "model", shards=shards)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "secret").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("x")
    (folder / "notes [draft].txt").write_text("a name that is a pattern")
    plan = publish_model(folder, dry_run=True)
    assert plan.repo_id is None and plan.url is None and plan.repo_type == "model"
    assert not any("cache" in name for name in plan.files)
    assert len(plan.files) == (4 if shards == 1 else 6)

    hub = FakeHub()
    pushed = publish_model(folder, "me/model", private=True, api=hub)
    assert hub.created == [("me/model", "model", True, True)]
    assert {name: len(data) for name, data in hub.contents["main"].items()} == plan.files == pushed.files
    assert list(hub.contents) == ["main"] and pushed.url == "https://hub.test/me/model"


def test_a_checkpoint_of_our_quantizer_passes_and_needs_its_base_model_named(tiny_llama_dir, tmp_path):
    from hf_ext.quantizers.mxfp4 import MXFP4Config
    from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint

    quantize_checkpoint(tiny_llama_dir, tmp_path / "packed", MXFP4Config(), base_model="org/base")
    plan = publish_model(tmp_path / "packed", dry_run=True)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(plan.files)
    quantize_checkpoint(tiny_llama_dir, tmp_path / "unnamed", MXFP4Config())
    with pytest.raises(ValueError, match="README.md lacks base_model.*--base-model OWNER/NAME"):
        publish_model(tmp_path / "unnamed", dry_run=True)


def test_a_dense_model_needs_no_base_model(tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("---\nlibrary_name: transformers\ntags: [x]\n---\n")
    save_file({"weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    assert set(publish_model(folder, dry_run=True).files) == {"README.md", "config.json", "model.safetensors"}


BREAK_MODEL = {
    "no config": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .*safetensors file"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        "model.safetensors is not a whole safetensors file",
    ),
    "torn header": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:20]),
        "model.safetensors is not a whole safetensors file",
    ),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "is not a whole safetensors file"),
    "no scale": (lambda f: drop(f, "layers.1.weight_scale"), "1 packed .* lack their scale: layers.1.weight_scale"),
    "no mantissas": (lambda f: drop(f, "layers.0.weight_mbs"), "lack their mbs: layers.0.weight_mbs"),
    "no packed": (lambda f: drop(f, "layers.0.weight_packed"), "lack their packed tensor: layers.0.weight_mbs"),
    "nothing packed": (
        lambda f: save_file({"weight": np.zeros(2)}, f / "model.safetensors"),
        "quant_method is hf_ext_mxfp4 and no tensor is packed",
    ),
    "no quantization_config": (lambda f: (f / "config.json").write_text("{}"), "no quantization_config"),
    "pickled": (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), r"pickled .*pytorch_model.bin"),
    "no card": (lambda f: (f / "README.md").unlink(), "no README.md"),
    "card without metadata": (lambda f: (f / "README.md").write_text("# Hello"), "does not begin with YAML"),
    "broken metadata": (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "does not begin with YAML"),
    "no library": (lambda f: edit(f / "README.md", "library_name: transformers\n", ""), "lacks library_name"),
    "no tags": (lambda f: edit(f / "README.md", "tags: [hf-ext, mxfp4]\n", ""), "lacks tags"),
    "no base": (lambda f: edit(f / "README.md", "base_model: org/base\n", ""), "lacks base_model"),
    "a path as base": (lambda f: edit(f / "README.md", "org/base", "/home/me/base"), "not a repository of the Hub"),
}


@pytest.mark.parametrize(("damage", "message"), BREAK_MODEL.values(), ids=BREAK_MODEL.keys())
def test_a_damaged_model_folder_is_refused_before_anything_is_sent(model, damage, message):
    damage(model)
    hub = FakeHub()
    with pytest.raises(ValueError, match=message):
        publish_model(model, "me/model", api=hub)
    assert hub.created == []


def test_every_cut_of_the_file_is_noticed(model):
    data = (model / "model.safetensors").read_bytes()
    for size in range(0, len(data), 37):
        (model / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            publish_model(model, dry_run=True)


def test_shards_and_index_must_agree(tmp_path):
    whole = write_model(tmp_path / "model", shards=2)
    index = "model.safetensors.index.json"

    def damaged(name: str) -> Path:
        return shutil.copytree(whole, tmp_path / name)

    lost = damaged("lost")
    (lost / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="puts tensor .* in model-00002-of-00002.safetensors, where it is not"):
        publish_model(lost, dry_run=True)
    unlisted = damaged("unlisted")
    listed = json.loads((unlisted / index).read_text())
    del listed["weight_map"]["layers.1.weight_scale"]
    (unlisted / index).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="does not list 1 tensor"):
        publish_model(unlisted, dry_run=True)
    without = damaged("without")
    (without / index).unlink()
    with pytest.raises(ValueError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
        publish_model(without, dry_run=True)


def test_all_that_is_wrong_is_in_one_message(model):
    (model / "README.md").unlink()
    drop(model, "layers.1.weight_scale")
    with pytest.raises(ValueError, match="lack their scale.*no README.md"):
        publish_model(model, dry_run=True)


def test_an_unfinished_quantisation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unfinished hf-ext quantize"):
        publish_model(write_model(tmp_path / "model.partial"), dry_run=True)


# --- the push ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo_id", "message"),
    [(None, "repo_id is missing"), ("model", "must name its owner too: OWNER/model"), ("a/b/c", "does not take")],
)
def test_a_missing_or_wrong_repository_is_an_error(model, repo_id, message):
    with pytest.raises(ValueError, match=message):
        publish_model(model, repo_id)


def test_offline_and_tokenless_pushes_say_so(model, monkeypatch):
    with pytest.raises(RuntimeError, match="HF_HUB_OFFLINE is set"):
        publish_model(model, "me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="no token of the Hub: run `hf auth login`"):
        publish_model(model, "me/model")


@pytest.mark.parametrize("error", [ConnectionError("no route"), OSError("disk")])
def test_a_failed_push_names_the_repository_and_the_cause(model, error):
    with pytest.raises(RuntimeError, match=f"the push to me/model failed: {error}"):
        publish_model(model, "me/model", api=FakeHub(error))


def test_a_refusal_of_the_hub_hints_at_the_token(model):
    from huggingface_hub.errors import HfHubHTTPError

    error = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(error, "403 Forbidden")
    error.response = type("Response", (), {"status_code": 403})()
    error.server_message = None
    with pytest.raises(RuntimeError, match="the Hub refused the push to me/model; the token may not write there"):
        publish_model(model, "me/model", api=FakeHub(error))


# --- kernels -------------------------------------------------------------------------------------------------------


def test_a_kernel_goes_out_once_per_backend_to_main_and_to_its_version(kernel):
    plan = publish_kernel(kernel, dry_run=True)
    assert plan.repo_id == "me/toy" and plan.repo_type == "kernel" and plan.branches == ("main", "v3")
    variants = {f"build/torch-{backend}/{name}" for backend in BACKENDS for name in ("__init__.py", "metadata.json")}
    assert set(plan.files) == {"README.md", "build.toml"} | variants

    hub = FakeHub()
    publish_kernel(kernel, "other/toy", api=hub)
    assert hub.created[0][:2] == ("other/toy", "kernel")
    assert hub.contents["main"] == hub.contents["v3"]
    assert {name: len(data) for name, data in hub.contents["v3"].items()} == plan.files
    for backend in BACKENDS:
        metadata = json.loads(hub.contents["v3"][f"build/torch-{backend}/metadata.json"])
        assert metadata["backend"] == {"type": backend} and metadata["id"] == "_toy_3"


def test_the_written_variants_load_with_the_kernels_library(kernel, tmp_path):
    from kernels import get_local_kernel

    write_kernel_variants(kernel, tmp_path / "out")
    assert not (tmp_path / "out" / "build" / "torch-universal").exists()
    assert get_local_kernel(tmp_path / "out").double(21) == 42  # the library picks torch-cpu here by itself


VARIANT = "build/torch-universal"
BREAK_KERNEL = {
    "no metadata": (lambda f: (f / VARIANT / "metadata.json").unlink(), "lacks build/torch-universal/metadata.json"),
    "no id": (lambda f: edit(f / VARIANT / "metadata.json", '"id"', '"ident"'), "metadata.json: .*id"),
    "bad name": (lambda f: edit(f / VARIANT / "metadata.json", "toy-kernel", "Toy_kernel"), "metadata.json: .*name"),
    "another version": (lambda f: edit(f / "build.toml", "version = 3", "version = 2"), "version is 2 here and 3"),
    "no code": (lambda f: (f / VARIANT / "__init__.py").unlink(), "lacks build/torch-universal/__init__.py"),
    "a foreign import": (lambda f: (f / VARIANT / "x.py").write_text("import hf_ext"), "x.py, line 1 imports hf_ext"),
    "no build.toml": (lambda f: (f / "build.toml").unlink(), "lacks build.toml"),
    "bad build.toml": (lambda f: (f / "build.toml").write_text("= 1"), "build.toml: "),
    "no card": (lambda f: (f / "README.md").unlink(), "lacks README.md"),
    "card of another library": (lambda f: edit(f / "README.md", ": kernels", ": peft"), "library_name: kernels"),
}


@pytest.mark.parametrize(("damage", "message"), BREAK_KERNEL.values(), ids=BREAK_KERNEL.keys())
def test_a_damaged_kernel_folder_is_refused_before_anything_is_sent(kernel, damage, message):
    damage(kernel)
    hub = FakeHub()
    with pytest.raises(ValueError, match=message):
        publish_kernel(kernel, "me/toy", api=hub)
    assert hub.created == []


def test_kinds_of_folders(model, kernel, tmp_path):
    assert kind_of(model) == "model" and kind_of(kernel) == "kernel"
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        kind_of(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a model folder"):
        kind_of(tmp_path / "empty")
