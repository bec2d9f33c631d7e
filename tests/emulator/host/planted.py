"""Faults planted in the text of a kernel: one alone, or many in one text, of which the program is told one."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class Fault(NamedTuple):
    file: str  # in csrc/cuda/kernels
    old: str
    new: str


class Change(NamedTuple):
    begin: int
    end: int
    text: str


def changes(text: str, old: str, new: str) -> list[Change]:
    """What a fault changes: `new` instead of `old`. "@name": of the code that has the comment `// @name`, so that the
    rest of the comment may change; {code} in `new` is that code. "every X": of all X. Else `old` is found once."""
    if old.startswith("@"):
        place = _marked(text, old[1:])
        return [_shortened(text, place, new.replace("{code}", text[place]))]
    everywhere, old = old.startswith("every "), old.removeprefix("every ")
    found = [match.start() for match in re.finditer(re.escape(old), text)]
    if len(found) != 1 and not (everywhere and found):
        raise ValueError(f"found {len(found)} times, expected once: {old}")
    return [_shortened(text, slice(at, at + len(old)), new) for at in found]


def _marked(text: str, marker: str) -> slice:
    """Where the code lies whose line has the comment `// @marker`: from where its brackets open."""
    found = list(re.finditer(rf"^ *(\S.*\S) *// @{marker}\b", text, re.MULTILINE))
    if len(found) != 1:
        raise ValueError(f"// @{marker} stands behind {len(found)} lines of code, expected one")
    begin, end = found[0].span(1)
    while text.count(")", begin, end) > text.count("(", begin, end):
        line = text.rindex("\n", 0, text.rindex("\n", 0, begin)) + 1
        begin = line + len(text[line:]) - len(text[line:].lstrip())
    return slice(begin, end)


def _shortened(text: str, place: slice, new: str) -> Change:
    """Without what is the same at both ends."""
    begin, end = place.start, place.stop
    while begin < end and new and text[begin] == new[0]:
        begin, new = begin + 1, new[1:]
    while begin < end and new and text[end - 1] == new[-1]:
        end, new = end - 1, new[:-1]
    return Change(begin, end, new)


def applied(text: str, some: list[Change], begin: int = 0, end: int | None = None) -> str:
    """text[begin:end] with the changes."""
    parts = []
    for change in sorted(some):
        parts += [text[begin : change.begin], change.text]
        begin = change.end
    return "".join((*parts, text[begin:end]))


@dataclass
class Block:
    """Braces of a text, and what is inside."""

    begin: int  # behind {
    end: int = 0  # of }
    statements: bool = False
    inner: list["Block"] = field(default_factory=list)
    faults: dict[int, list[Change]] = field(default_factory=dict)

    def holds(self, some: list[Change]) -> bool:
        return all(self.begin <= c.begin and c.end <= self.end for c in some)


_SKIPPED = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^ *#[^\n]*', re.DOTALL | re.MULTILINE
)


def _blanked(text: str) -> str:
    """Comments, strings and directives as spaces: what is left has the braces of the code."""
    return _SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def _has_statements(before: str) -> bool:
    """Whether braces behind this code hold statements, so that others can stand in their place."""
    before = before.rstrip()
    before = re.sub(r"\) *-> *[\w:<>*& ]+$|\)[\s\w]*$", ")", before)
    if before.endswith(")"):
        depth, at = 0, len(before)
        while at:
            at -= 1
            depth += (before[at] == ")") - (before[at] == "(")
            if depth == 0:
                break
        return not re.search(r"\b(switch|alignas|__align__) *$", before[:at])
    return bool(re.search(r"\b(else|do)$", before))


def _blocks(text: str) -> Block:
    code = _blanked(text)
    whole = Block(0, len(code))
    open_ones = [whole]
    for match in re.finditer(r"[{}]", code):
        if match.group() == "{":
            block = Block(match.end(), statements=_has_statements(code[max(0, match.start() - 2000) : match.start()]))
            open_ones[-1].inner.append(block)
            open_ones.append(block)
        else:
            open_ones.pop().end = match.start()
    return whole


def _place(block: Block, some: list[Change]) -> Block | None:
    """The innermost block of statements that holds the changes."""
    for inner in block.inner:
        if inner.holds(some):
            return _place(inner, some) or (inner if inner.statements else None)
    return None


def switched(text: str, faults: dict[int, tuple[str, str]]) -> str:
    """`text` with all faults, by their numbers; emulator::planted(number) says which of them is there. The block of
    statements around a fault stands there twice."""
    whole = _blocks(text)
    for number, fault in faults.items():
        some = changes(text, *fault)
        parts = [some] if _place(whole, some) else [[change] for change in some]
        for part in parts:
            block = _place(whole, part)
            if block is None:
                raise ValueError(f"not inside of statements: {fault[0]}")
            block.faults.setdefault(number, []).extend(part)
    return _written(text, whole)


def _written(text: str, block: Block) -> str:
    parts, at = [], block.begin
    for number, some in block.faults.items():
        parts.append(f" if (emulator::planted({number})) {{{applied(text, some, block.begin, block.end)}}} else ")
    parts.append("{" if block.faults else "")
    for inner in block.inner:
        parts += [text[at : inner.begin], _written(text, inner)]
        at = inner.end
    parts += [text[at : block.end], "}" if block.faults else ""]
    return "".join(parts)
