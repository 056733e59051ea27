import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hf_ext.runlog import RunLog, atomic_write, read_rows, write_json


def test_appended_rows_are_read_back_in_order(tmp_path):
    log = RunLog(tmp_path / "new" / "rows.jsonl", key=("a",))
    rows = [{"a": 1, "text": "é\n"}, {"a": 2, "nested": {"b": [1, None]}}]
    for row in rows:
        log.append(row)
    assert log.rows() == rows
    assert log.done(a=1) and not log.done(a=3)


def test_half_a_surrogate_pair_comes_back_as_it_was(tmp_path):
    log = RunLog(tmp_path / "rows.jsonl", key=("a",))
    log.append({"a": "\ud800é\U0001f600\\ud800"})
    assert log.rows() == [{"a": "\ud800é\U0001f600\\ud800"}]
    assert "é\U0001f600".encode() in log.path.read_bytes()


def test_a_missing_file_has_no_rows(tmp_path):
    assert RunLog(tmp_path / "none.jsonl", key=("a",)).rows() == []


def test_every_possible_tear_of_the_last_line_loses_that_line_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    log = RunLog(path, key=("a",))
    log.append({"a": 1})
    intact = path.read_bytes()
    log.append({"a": 2, "b": {"c": {}}})
    whole = path.read_bytes()
    for cut in range(len(intact), len(whole)):
        path.write_bytes(whole[:cut])
        assert log.rows() == [{"a": 1}]
        log.append({"a": 3})
        assert log.rows() == [{"a": 1}, {"a": 3}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        read_rows(path)


def test_the_latest_row_of_a_key_wins_and_list_keys_equal_tuple_keys(tmp_path):
    log = RunLog(tmp_path / "rows.jsonl", key=("a", "b"))
    log.append({"a": 1, "b": (2, 3), "value": "old"})
    log.append({"a": 1, "b": [2, 3], "value": "new"})
    assert [row["value"] for row in log.latest().values()] == ["new"]
    assert log.done(a=1, b=(2, 3))
    assert log.get(a=1, b=[2, 3])["value"] == "new"
    assert log.get(a=2, b=[2, 3]) is None
    assert not log.done(a="1", b=(2, 3))


def test_rows_are_written_together_or_not_at_all(tmp_path):
    log = RunLog(tmp_path / "rows.jsonl", key=("a",))
    log.extend([])
    assert not log.path.exists()
    log.extend({"a": number} for number in range(3))
    assert log.rows() == [{"a": 0}, {"a": 1}, {"a": 2}]
    for bad in ({"b": 1}, {"a": 5, "value": float("inf")}, {"a": object()}):
        with pytest.raises((ValueError, TypeError)):
            log.extend([{"a": 4}, bad])
    assert len(log.rows()) == 3
    with open(log.path, "ab") as file:
        file.write(b'{"a": 3, "torn')
    log.extend([{"a": 6}, {"a": 7}])
    assert [row["a"] for row in log.rows()] == [0, 1, 2, 6, 7]


@pytest.mark.parametrize("row", [{"b": 1}, {"a": float("nan")}])
def test_a_row_without_its_key_or_not_json_is_refused_and_writes_nothing(tmp_path, row):
    log = RunLog(tmp_path / "rows.jsonl", key=("a",))
    with pytest.raises(ValueError):
        log.append(row)
    assert not log.path.exists()


def test_asking_for_another_key_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the key of rows.jsonl is"):
        RunLog(tmp_path / "rows.jsonl", key=("a",)).done(b=1)


def test_a_failed_atomic_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyError):
        with atomic_write(path) as file:
            file.write("half of the ne")
            raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_an_atomic_write_has_ordinary_permissions(tmp_path):
    write_json(tmp_path / "a" / "value.json", {"é": [1]})
    (tmp_path / "plain").touch()
    assert json.loads((tmp_path / "a" / "value.json").read_text(encoding="utf-8")) == {"é": [1]}
    assert (tmp_path / "a" / "value.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_killed_writer_never_shows_half_a_file(tmp_path):
    code = (
        "from hf_ext.runlog import atomic_write\n"
        "with atomic_write('big.bin', 'wb') as file:\n"
        "    print('open', flush=True)\n"
        "    while True: file.write(b'x' * 100_000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "big.bin").exists()
