"""Files of results, written anew after each row: a run that is cut keeps what it has."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Nobody ever sees half of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def write_json(path: Path, document: dict) -> None:
    write(path, json.dumps(document, indent=1) + "\n")


def read_to_append(path: Path, document: dict) -> dict:
    """The results in `path` that a run may be added to; ValueError if they are of another machine, torch or commit."""
    old = json.loads(path.read_text())
    for key in ("device", "gpu", "cpu", "torch", "commit", "threads"):
        if old[key] != document[key]:
            raise ValueError(f"--append: {path} has results of {key} {old[key]}, this run is of {document[key]}")
    return old
