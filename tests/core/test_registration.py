"""`import hf_ext` alone makes transformers know our quantizers, in every order of imports. All in fresh processes."""

import pytest

CHECK = """
import transformers.quantizers.auto as auto
config = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["hf_ext_mxfp4"]
assert config.__name__ == "MXFP4Config", config
assert auto.AUTO_QUANTIZER_MAPPING["hf_ext_mxfp4"].__name__ == "MXFP4HfQuantizer"
assert not any(type(finder).__module__.startswith("hf_ext") for finder in sys.meta_path), sys.meta_path
assert type(auto.__loader__).__module__ == type(auto.__spec__.loader).__module__ == "_frozen_importlib_external"
print("registered")
"""
ORDERS = {
    "hf_ext first": "import hf_ext, transformers.quantizers.auto",
    "hf_ext first, model classes": "import hf_ext; from transformers import AutoModelForCausalLM",
    "hf_ext first, then modeling_utils": "import hf_ext, transformers.modeling_utils",
    "transformers first": "import transformers.modeling_utils, hf_ext",
    "transformers imported lazily, nothing loaded": "import transformers, hf_ext; from transformers import LlamaModel",
    "our quantizer first": "import hf_ext.quantizers.mxfp4.quantizer",
    "a public name first": "from hf_ext import MXFP4Config, MXFP4HfQuantizer",
    "twice": "import hf_ext; hf_ext._registration.install(); import transformers.modeling_utils; "
    "hf_ext._registration.install(); hf_ext._registration.register_all()",
}


@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS.keys())
def test_registered_in_every_order_of_imports(fresh_python, imports):
    code = f"import sys, warnings; warnings.simplefilter('error', RuntimeWarning)\n{imports}\n{CHECK}"
    assert fresh_python(code).endswith("registered\n")


def test_a_checkpoint_of_ours_loads_after_import_hf_ext_alone(fresh_python, tiny_llama_dir, tmp_path):
    fresh_python(
        "from hf_ext import MXFP4Config\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tiny_llama_dir)!r}, quantization_config=MXFP4Config())\n"
        f"model.save_pretrained({str(tmp_path)!r})"
    )
    for imports in ("import hf_ext, transformers", "import transformers.modeling_utils, hf_ext"):
        out = fresh_python(
            f"{imports}\nfrom transformers import AutoModelForCausalLM\n"
            f"model, info = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, output_loading_info=True)\n"
            "assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys'], info\n"
            "print(type(model.model.layers[0].mlp.up_proj).__name__)"
        )
        assert out.endswith("MXFP4Linear\n")


def test_find_spec_pickle_source_and_reload_of_the_module_still_work(fresh_python):
    fresh_python(
        "import hf_ext, importlib, importlib.util, inspect, pickle, sys\n"
        "name = 'transformers.quantizers.auto'\n"
        "import transformers\n"
        "folder = transformers.__path__[0] + '/quantizers'\n"
        "spec = sys.meta_path[0].find_spec(name, [folder])\n"
        "assert name not in sys.modules and spec.origin.endswith('auto.py')\n"
        "assert 'register_quantizer' in spec.loader.get_source(name)\n"  # delegated
        "import transformers.quantizers.auto as auto\n"
        "assert 'register_quantizer' in inspect.getsource(auto)\n"
        "assert pickle.loads(pickle.dumps(auto.AutoHfQuantizer)) is auto.AutoHfQuantizer\n"
        "pickle.dumps(auto.__spec__.loader)\n"
        "importlib.reload(auto)\n"
        "hf_ext._registration.register_all()\n"
        "assert 'hf_ext_mxfp4' in auto.AUTO_QUANTIZER_MAPPING\n"
    )


def test_importing_hf_ext_while_the_quantizers_are_loading_still_registers(fresh_python, tmp_path):
    # Stands for a library that transformers imports and that imports hf_ext: seen from inside, the module is half
    # loaded, and its dictionaries do not exist yet.
    fresh_python(
        "import importlib.machinery as m, sys\n"
        "real = m.SourceFileLoader.exec_module\n"
        "def exec_module(self, module):\n"
        "    if module.__name__ == 'transformers.quantizers.auto' and 'hf_ext' not in sys.modules:\n"
        "        import hf_ext\n"
        "    return real(self, module)\n"
        "m.SourceFileLoader.exec_module = exec_module\n"
        "import transformers.modeling_utils\n"
        "assert 'hf_ext' in sys.modules\n" + CHECK
    )


def test_threads_that_import_both_at_once_register_once(fresh_python):
    code = (
        "import sys, threading, warnings; warnings.simplefilter('error')\n"
        "barrier = threading.Barrier(4); errors = []\n"
        "def work(names):\n"
        "    barrier.wait()\n"
        "    try:\n"
        "        for name in names: __import__(name)\n"
        "    except BaseException as error: errors.append(error)\n"
        "pair = ['hf_ext', 'transformers.quantizers.auto']\n"
        "threads = [threading.Thread(target=work, args=(p,)) for p in (pair, pair[::-1], pair, pair[::-1])]\n"
        "[t.start() for t in threads]; [t.join(60) for t in threads]\n"
        "assert not errors and not any(t.is_alive() for t in threads), errors\n"
        "import importlib.util; importlib.util.find_spec('this')\n"
    )
    fresh_python("import sys\n" + code + CHECK)


def test_a_failed_registration_warns_and_the_method_raises_its_cause_when_used(fresh_python):
    out = fresh_python(
        "import warnings, hf_ext.registration as r\n"
        "r.TABLE = (r.Registration('hf_ext_broken', 'hf_ext.no_such_module'),)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import transformers.modeling_utils\n"
        "print([str(w.message) for w in caught if w.category is RuntimeWarning])\n"
        "from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig\n"
        "assert AutoHfQuantizer.supports_quant_method({'quant_method': 'hf_ext_broken'})\n"
        "try: AutoQuantizationConfig.from_dict({'quant_method': 'hf_ext_broken'})\n"
        "except ImportError as error: print(error)\n"
    )
    warning, error = out.strip().splitlines()
    assert "hf_ext_broken" in warning and "no_such_module" in warning
    assert "hf_ext_broken" in error and "no_such_module" in error
