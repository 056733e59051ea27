"""The card of a packed checkpoint, and that `push_to_hub` uploads it."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM
from transformers.utils import hub

from hf_ext import MXFP4Config, quantize_model
from hf_ext.quantizers.mxfp4.card import config_expression, model_card
from hf_ext.quantizers.mxfp4.checkpoint import quantize_checkpoint


def test_metadata_says_what_the_checkpoint_is():
    data = {"license": "apache-2.0", "language": ["en"], "tags": ["other"], "widget": "no"}
    text = model_card("me/m-mxfp4", MXFP4Config(), base_model="org/m", source_data=data)
    card = ModelCard(text)
    card_data = card.data.to_dict()
    assert card_data["library_name"] == "transformers"
    assert card_data["base_model"] == "org/m" and card_data["base_model_relation"] == "quantized"
    assert card_data["tags"] == ["hf-ext", "mxfp4", "quantized"]
    assert card_data["license"] == "apache-2.0" and card_data["language"] == ["en"]
    assert "widget" not in card_data
    assert "import hf_ext" in text and "random weights" in text and "4.312 bits" in text


def test_standard_format_says_that_hf_ext_is_not_needed():
    text = model_card("m", MXFP4Config.vllm(), format="compressed-tensors")
    assert "import hf_ext" not in text and "random weights" not in text
    assert re.search(r"hf-ext is\s+not needed", text)
    assert "compressed-tensors" in ModelCard(text).data.tags


def test_configuration_is_shown_as_an_expression_that_gives_it_back():
    config = MXFP4Config.paper(search_exponents=True, scale_rule="ceil")
    assert eval(config_expression(config), {"MXFP4Config": MXFP4Config}) == config


def test_snippet_of_a_written_card_loads_the_checkpoint(tiny_llama_dir, tmp_path, fresh_python):
    quantize_checkpoint(tiny_llama_dir, tmp_path / "packed")
    snippet = re.search(r"```python\n(import hf_ext.*?)```", (tmp_path / "packed" / "README.md").read_text(), re.S)[1]
    out = fresh_python(snippet + "\nprint(type(model.model.layers[0].mlp.up_proj).__name__)", cwd=tmp_path)
    assert "MXFP4Linear" in out


class Uploads(list):
    """What would have gone to the Hub."""


@pytest.fixture
def uploads(monkeypatch):
    sent = Uploads()

    class Api:
        def create_repo(self, repo_id, **_):
            return type("Repo", (), {"repo_id": repo_id})

    def upload(self, working_dir, repo_id, *_, **__):
        sent.append({path.name: path.read_bytes() for path in Path(working_dir).iterdir()})

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr(hub.ModelCard, "load", no_card)
    return sent


def no_card(*_, **__):
    raise EntryNotFoundError("no card")


def test_push_to_hub_of_a_quantised_model_uploads_our_card(tiny_llama_dir, uploads, monkeypatch):
    model = quantize_model(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), MXFP4Config(macro_block_size=64))
    model.push_to_hub("me/packed")
    text = uploads[0]["README.md"].decode()
    assert 'from_pretrained("me/packed")' in text and "macro_block_size=64" in text
    assert str(tiny_llama_dir) not in text
    assert ModelCard(text).data.tags == ["hf-ext", "mxfp4", "quantized"]

    written = "---\ntags: [mine]\n---\nwritten by hand"
    monkeypatch.setattr(hub.ModelCard, "load", lambda *_, **__: ModelCard(written))
    model.push_to_hub("me/packed")
    text = uploads[1]["README.md"].decode()
    assert "written by hand" in text and ModelCard(text).data.tags == ["mine", "hf-ext", "mxfp4", "quantized"]


def test_dequantised_model_gets_the_card_of_transformers_again(tiny_llama_dir, uploads):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    model.dequantize()
    model.push_to_hub("me/dense")
    text = uploads[0]["README.md"].decode()
    assert "automatically generated" in text and "mxfp4" not in text


def test_model_with_the_card_hook_can_be_copied_and_saved(tiny_llama_dir, tmp_path):
    import copy
    import pickle

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, quantization_config=MXFP4Config())
    twin = copy.deepcopy(model)
    assert twin._upload_modified_files.__self__ is twin
    assert pickle.loads(pickle.dumps(model))._upload_modified_files is not None
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(twin(torch.arange(8)[None]).logits, model(torch.arange(8)[None]).logits)
