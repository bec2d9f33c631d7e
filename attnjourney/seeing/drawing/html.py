"""One HTML page, complete in itself, in which a model's attention to a text is explored."""

from __future__ import annotations

import base64
import ctypes
import html
import json
import math
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from ..._version import __version__
from ._layers import Weights, as_layers, numbers
from .figures import RAMP
from .summary import HeadSummary, weights_summary

MAX_TOKENS = 512
SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
VISIBLE = {" ": ("·", "space"), "\n": ("↵", "line break"), "\t": ("⇥", "tab"), "\r": ("␍", "carriage return")}


@dataclass(frozen=True)
class Token:
    """How a token is shown: a few characters, its name in words if they do not say it, and whether a line ends."""

    text: str
    name: str | None = None
    kind: str | None = None  # "faint": white space; "byte": a byte of a longer character, or of none
    breaks: bool = False


def byte_tokens(data: bytes) -> list[Token]:
    """A token per byte. A character of several bytes is é₁ é₂, a byte that is no UTF-8 its number, as in \\xE9."""
    tokens: list[Token] = []
    at = 0
    while at < len(data):
        length = _character(data, at)
        piece = data[at : at + max(1, length)]
        if length == 1:
            tokens.append(as_token(piece.decode()))
        elif length == 0:
            tokens.append(Token(f"\\x{piece[0]:02X}", f"byte {piece[0]:02X}, not UTF-8", "byte"))
        else:
            shown = as_token(piece.decode())
            for i, byte in enumerate(piece, 1):
                name = f"byte {byte:02X}, {i} of {length} of {shown.name or shown.text}"
                tokens.append(Token(shown.text + SUBSCRIPTS[i], name, "byte"))
        at += len(piece)
    return tokens


def _character(data: bytes, at: int) -> int:
    """How many bytes the UTF-8 character at `at` has; 0: there is none."""
    for length in range(1, 5):
        try:
            if len(data[at : at + length].decode()) == 1:
                return length
        except UnicodeDecodeError:
            pass
    return 0


def as_token(token: str | bytes | Token) -> Token:
    """Strings as they are, but for what would not be seen: white space, control characters, lone marks."""
    if isinstance(token, Token):
        return token
    if isinstance(token, bytes):
        parts = byte_tokens(token)
        if len(parts) == 1:
            return parts[0]
        token = token.decode(errors="backslashreplace")
    if not isinstance(token, str):
        raise TypeError(f"tokens: expected str, bytes or Token, got {type(token).__name__}")
    if token == "":
        return Token("∅", "empty token", "faint")
    text = "".join(map(_visible, token))
    if unicodedata.category(token[0]) in ("Mn", "Me"):
        text = "◌" + text
    names = [VISIBLE[c][1] if c in VISIBLE else _visible(c) for c in token]
    name = " ".join(names) if text != token and not any(c.isalnum() for c in token) else None
    return Token(text, name, "faint" if token.isspace() else None, token.endswith("\n"))


def _visible(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character][0]
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"):
        return f"U+{ord(character):04X}"
    return character


def page(
    tokens: Sequence[str | bytes | Token],
    weights: Weights,
    *,
    title: str = "What attention looks at",
    note: str = "",
    warning: str = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[Sequence[int]] | None = None,
) -> str:
    """An HTML page of one sequence's self-attention: every layer, head and token by mouse, keyboard or finger.

    The page is one file that loads nothing: styles and scripts are its own, and weights are in it as bytes (255 steps
    of their square root, so that small ones keep their size), compressed. It follows the system's light or dark. It is
    ASCII alone, so any encoding will do to write it.

    Args:
        tokens: what is read. Strings and bytes are made visible; byte_tokens makes them of text for models that read
            bytes. At most 512.
        weights: what attnjourney.capture recorded, or tensors: (layers, heads, tokens, tokens), or (heads, tokens,
            tokens) for each layer, as attnjourney.attention_weights gives them: row i is where token i looks.
        title, note, warning: text, above all: what is shown, and what the reader must know before believing it.
        layers: their numbers; 0, 1, ... by default.
        heads: for each layer the numbers of its heads; those recorded, or 0, 1, ..., by default.

    Raises ValueError for shapes, numbers of labels, more than 512 tokens and weights outside 0 .. 1; TypeError for what
    is no token and what holds no weights.
    """
    shown = [as_token(token) for token in tokens]
    n = len(shown)
    if not 1 <= n <= MAX_TOKENS:
        raise ValueError(
            f"tokens: expected 1 to {MAX_TOKENS}, got {n}; for long sequences there are viz.attention_maps and heatmap"
        )
    found = as_layers(weights)
    if not found:
        raise ValueError("weights: expected at least one layer, got none")
    tables = [_checked(index, layer.of_one_sequence(), n) for index, layer in enumerate(found)]
    layers = numbers("layers", layers, len(found), range(len(found)))
    heads = [list(names) for names in numbers("heads", heads, len(found), [layer.heads for layer in found])]
    summary = weights_summary(tables, layers=layers, heads=heads)

    steps = torch.cat([t.float().sqrt().mul(255).round().to(torch.uint8) for t in tables])  # (all heads, n, n)
    data = {
        "tokens": [{k: v for k, v in vars(token).items() if v} for token in shown],
        "words": sum(len(token.text) for token in shown) > 1.5 * n and not any(t.kind == "byte" for t in shown),
        "layers": [{"layer": layer, "heads": names} for layer, names in zip(layers, heads)],
        "ramp": RAMP,
        "weights": base64.b64encode(zlib.compress(ctypes.string_at(steps.data_ptr(), steps.numel()), 9)).decode(),
        "summary": _rows(summary, tables),
    }
    return _fill({
        "title": _escape(title),
        "note": _escape(note),
        "warning": f'<p class="warning" role="note">{_escape(warning)}</p>' if warning else "",
        "version": _escape(__version__),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # no </script> inside, and ASCII alone
        "css": _template("page.css"),
        "js": _template("page.js"),
    })  # fmt: skip


def _checked(index: int, weights: Tensor, n: int) -> Tensor:
    """(heads, n, n) on the CPU."""
    if weights.shape[0] == 0 or tuple(weights.shape[1:]) != (n, n):
        raise ValueError(
            f"weights: expected (heads, {n}, {n}) for layer {index} and {n} tokens, got {tuple(weights.shape)}"
        )
    weights = weights.cpu()
    low, high = weights.min().item(), weights.max().item()
    if not (low >= 0 and high <= 1.01):  # NaN is neither
        raise ValueError(f"weights: expected numbers from 0 to 1 in layer {index}, got {low:g} to {high:g}")
    return weights.clamp(max=1)


def _rows(summary: HeadSummary, tables: Sequence[Tensor]) -> list[dict]:
    """The summary for JSON: NaN as null, and where each row's weights are."""
    places = [(i, j) for i, t in enumerate(tables) for j in range(len(t))]
    return [
        {k: None if isinstance(v, float) and math.isnan(v) else round(v, 5) for k, v in row.items()} | {"at": place}
        for row, place in zip(summary.as_dicts(), places)
    ]


def _escape(text: str) -> str:
    """Text as HTML in ASCII: the page is the same in every encoding."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def _template(name: str) -> str:
    return (resources.files(__package__) / "template" / name).read_text(encoding="utf-8")


def _fill(values: dict[str, str]) -> str:
    """The template with {{name}} replaced, in one pass: values are not searched for more."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _template("page.html"))
