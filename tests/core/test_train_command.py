"""`hf-ext train METHOD`: which scripts there are, and how one is run."""

import sys

import pytest

import hf_ext.trainers
from hf_ext.cli import main, train


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A method whose script prints what it is given."""
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text(
        '"""Print\nthe arguments.\n\nMore."""\nimport sys\n'
        "class C: pass\nassert getattr(sys.modules['__main__'], 'C') is C  # as under python -m\n"
        "if 'fail' in sys.argv: raise ValueError('nothing to train on')\n"
        "if __name__ == '__main__': print(sys.argv[1:])\n"
    )
    monkeypatch.setattr(hf_ext.trainers, "__path__", [*hf_ext.trainers.__path__, str(tmp_path)])
    monkeypatch.setattr(hf_ext.trainers.__spec__, "submodule_search_locations", [str(tmp_path)])
    monkeypatch.setattr(train, "app", train.lazy_app(train.scripts(), help="x"))


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    return stopped.value.code or 0


def test_a_script_is_listed_with_the_first_line_of_its_docstring(echo, capsys):
    assert train.scripts() == {"echo": ("hf_ext.cli.train:echo", "Print the arguments.")}
    assert call("--help") == 0
    assert "Print the arguments." in capsys.readouterr().out


def test_a_script_gets_every_argument_help_too_and_sys_argv_is_put_back(echo, capsys):
    before = list(sys.argv)
    assert call("echo", "--config", "x.yaml", "--help", "-h", "word", "--seed=1") == 0
    assert capsys.readouterr().out == "['--config', 'x.yaml', '--help', '-h', 'word', '--seed=1']\n"
    assert sys.argv == before


def test_an_error_of_a_script_is_one_line(echo, capsys):
    assert call("echo", "fail") == 1
    assert capsys.readouterr().err == "error: nothing to train on\n"


def test_an_unknown_method_lists_those_that_there_are(echo, capsys):
    assert call("eco") == 2
    assert "No such command 'eco'; there are echo." in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_without_trl_the_extra_is_named(echo, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert call("echo") == 1
    assert "pip install 'hf-ext[trainers]'" in capsys.readouterr().err
