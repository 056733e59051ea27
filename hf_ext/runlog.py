"""Logs that survive a kill: JSON lines appended row by row, and files that are either whole or absent.

Used by every benchmark and every long command: append a row when a piece of work is done, ask on the next start which
pieces are done already.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class RunLog:
    """A JSON-lines file of finished work, safe to append to after a kill.

    Args:
        path: The file; it and its folder are created by the first `append`.
        key: Names of the fields that identify a row. Of rows with the same key, `latest` gives the last.

    Example:
        >>> log = RunLog("rows.jsonl", key=("model", "format"))
        >>> if not log.done(model="smol", format="mxfp4"):
        ...     log.append({"model": "smol", "format": "mxfp4", "perplexity": 21.5})
    """

    def __init__(self, path: str | os.PathLike[str], key: Sequence[str]) -> None:
        self.path = Path(path)
        self.key = tuple(key)
        if not self.key:
            raise ValueError("key is empty: name the fields that identify a row")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and flush it to the disk before returning.

        Raises:
            ValueError: A key field is missing, or a value is not JSON (NaN and infinities are not).
        """
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write several rows and flush them to the disk together; none is written if one of them is refused.

        Raises:
            ValueError: See `append`.
        """
        lines = []
        for row in rows:
            self._key_of(row)
            lines.append(row_line(row))
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        with open(self.path, "ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All rows in the order written; a line torn by a kill is left out.

        Raises:
            ValueError: A line that is not torn is not a JSON object, with its number.
        """
        return read_rows(self.path)

    def latest(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """The last row of each key, in the order in which the keys first appeared.

        The dictionary's own keys are opaque: use `get` to look a row up.
        """
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for row in self.rows():
            found[self._key_of(row)] = row
        return found

    def get(self, **key: Any) -> dict[str, Any] | None:
        """The last row with exactly these key values, or None.

        Raises:
            ValueError: The names are not the log's key.
        """
        if set(key) != set(self.key):
            raise ValueError(f"got the names {sorted(key)}, but the key of {self.path.name} is {sorted(self.key)}")
        return self.latest().get(self._key_of(key))

    def done(self, **key: Any) -> bool:
        """Whether a row with exactly these key values exists.

        Raises:
            ValueError: The names are not the log's key.
        """
        return self.get(**key) is not None

    def _key_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        missing = [name for name in self.key if name not in row]
        if missing:
            raise ValueError(f"row of {self.path.name} lacks the key fields {missing}")
        # As JSON, so that a key compares equal before and after it has been in the file (tuple and list, for one), and
        # the number 1 is not the text "1".
        return tuple(json.dumps(row[name], sort_keys=True) for name in self.key)


def row_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of a JSON-lines file.

    Raises:
        ValueError: A value is not JSON (NaN and infinities are not).
    """
    # Half a surrogate pair, as an endpoint's JSON may hold, is written as the escape that it was there.
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"


def _cut_torn_line(path: Path) -> None:
    """Remove what follows the last newline: half a row that a killed process left."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        whole = file.read(1) == b"\n"
    if not whole:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a JSON-lines file; a missing file has no rows, and a last line without its newline (torn) is left out.

    Raises:
        ValueError: Another line is not a JSON object, with its number.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        rows.append(row)
    return rows


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under its name only when the block ends without an error, whole and on the disk.

    Args:
        path: The file; an existing one is replaced, never half overwritten. Its folder is created.
        mode: `"w"` (UTF-8 text) or `"wb"`.

    Raises:
        ValueError: Another mode.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode is {mode!r}; atomic_write knows 'w' and 'wb'")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic within one file system only.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        # mkstemp makes files private to the user; a result should get the ordinary permissions.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        with os.fdopen(descriptor, mode, encoding="utf-8" if mode == "w" else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole text file atomically (see `atomic_write`)."""
    with atomic_write(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value as indented JSON, atomically, with a newline at the end (see `atomic_write`)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _sync_folder(folder: Path) -> None:
    # The rename itself reaches the disk with the folder. Windows cannot open folders.
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
