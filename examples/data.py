"""Real text as a tensor of bytes: read it, cut it in two, draw batches."""

import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_BYTES = 8 << 20  # 8 MiB: far more than the demo's training steps can see
HELD_OUT = 0.1  # the last tenth is never trained on


class TextError(Exception):
    """The text cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Text:
    source: str  # where it comes from, in words
    train: torch.Tensor  # (train_bytes,) uint8
    held_out: torch.Tensor  # (held_out_bytes,) uint8


def load_text(path: Path | None, context: int) -> Text:
    """The text of a file, of all text files of a folder, or (None) of the Python standard library's own sources."""
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        source, files = f"Python standard library ({folder}/*.py)", sorted(folder.glob("*.py"))
        data = read_files(files)
        if not data:
            raise TextError(f"this Python has no standard library sources in {folder}: give a text with --text PATH")
    elif path.is_dir():
        source, data = f"folder {printable(os.fsencode(path))}", read_files(files_below(path))
        if not data:
            raise TextError(f"{path}: no readable text file in this folder")
    else:
        source, data = f"file {printable(os.fsencode(path))}", read_file(path)
    return split(source, data, context)


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted by name in each folder; names that begin with a dot (.git) are left out."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:  # a folder we may not read
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
        elif not entry.is_symlink():  # a link may lead in circles
            yield from files_below(entry)


def read_files(files: Iterable[Path]) -> bytes:
    """The files one after the other, up to MAX_BYTES; what is not text or cannot be read is left out."""
    data = bytearray()
    for file in files:
        try:
            data += read_file(file, MAX_BYTES - len(data))
        except TextError:
            continue
        if len(data) >= MAX_BYTES:
            break
    return bytes(data)


def read_file(file: Path, limit: int = MAX_BYTES) -> bytes:
    """The first bytes of one file. Any encoding without zero bytes will do, as the models read bytes."""
    if not file.exists():
        raise TextError(f"{file}: no such file or folder")
    if not file.is_file():  # a device or a pipe could go on for ever
        raise TextError(f"{file}: neither a file nor a folder")
    try:
        with file.open("rb") as stream:
            data = stream.read(limit)
    except OSError as error:
        raise TextError(f"{file}: cannot be read ({error.strerror})") from error
    if not data:
        raise TextError(f"{file}: the file is empty")
    if b"\0" in data:
        raise TextError(f"{file}: a binary file (zero byte at offset {data.index(0)}), not text")
    return data


def split(source: str, data: bytes, context: int) -> Text:
    """Cuts off the held-out end. Both parts must hold at least one context and the byte after it."""
    least = context + 1
    held_out = max(least, int(HELD_OUT * len(data)))
    if len(data) - held_out < least:
        raise TextError(f"{source}: {len(data)} bytes are too short for context {context}, which needs {2 * least}")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(source, tokens[:-held_out], tokens[-held_out:])


def random_batch(tokens: torch.Tensor, batch: int, context: int, generator: torch.Generator):
    """Inputs and targets, both (batch, context) int64: the target is the next byte."""
    start = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
    window = tokens[start + torch.arange(context + 1)].long()  # (batch, context + 1)
    return window[:, :-1], window[:, 1:]


def held_out_windows(tokens: torch.Tensor, context: int, limit: int = 256):
    """Inputs and targets, both (windows, context) int64: at most `limit` windows, evenly spread, none overlapping."""
    windows = (len(tokens) - 1) // context
    count = min(windows, limit)
    start = (torch.arange(count) * windows // count * context).unsqueeze(1)  # (count, 1)
    window = tokens[start + torch.arange(context + 1)].long()  # (count, context + 1)
    return window[:, :-1], window[:, 1:]


def sentence(tokens: torch.Tensor, longest: int) -> bytes:
    """The first line of 20 to `longest` bytes that is made of words; without one, the first bytes."""
    data = bytes(tokens.tolist())
    for line in data.splitlines():
        line = line.strip()
        letters = sum(map(str.isalpha, line.decode("latin-1")))
        spaces = line.count(b" ")
        if 20 <= len(line) <= longest and spaces >= 2 and letters + spaces > 0.95 * len(line) and line[-1:].isalpha():
            return line
    return data[:longest]


def printable(data: bytes) -> str:
    """As text; what is not a character of UTF-8 or cannot be shown becomes a replacement mark."""
    characters = data.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in characters)
