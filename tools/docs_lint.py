"""Checks the English of the documents: ``python -m tools.docs_lint``, part of ``make lint``.

It reports unknown words, sentences of more than 30 words, and links that lead nowhere, and fails if
there are any. It reads Markdown pages and the Markdown cells of notebooks. It skips code, and does
not limit the length of table cells, which are not sentences. The dictionary is pyspellchecker's;
``tools/docs_words.txt`` adds the words of our subject.

``--count`` prints the number of words of each document instead.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from spellchecker import SpellChecker

from tools.documents import cells, documents
from tools.references import broken_links_below

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "tools" / "docs_words.txt"
LONGEST = 30
"""Words that a sentence may have."""

SENTENCE_END = re.compile(r"(?<=[.!?])[\"”)]?\s+(?=[\"“(]?(?:[A-Z`\d]|fedstill\b))")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|et al|eq|eqs|sec|fig|tab|no)\.$", re.IGNORECASE)
WORD = re.compile(r"(?<![\w./@-])[A-Za-z]?[a-z]+(?:['’][a-z]+)?(?![\w/@]|\.\w)")
POSSESSIVE = re.compile(r"['’]s?$")
DIRECTIVE = re.compile(r"^::: .*$", re.MULTILINE)
"""A line of the reference that inserts the docstrings of a module."""
MARKS = {"softbreak": " ", "hardbreak": " ", "code_inline": "`"}
"""The text of tokens that are not text; a piece of code counts as one word."""


@dataclass(frozen=True)
class Passage:
    """A paragraph, a heading, an item of a list or a cell of a table, without its markup."""

    line: int
    """Its first line in the file; in a notebook, the number of its cell."""
    text: str
    in_table: bool


def passages(path: Path) -> Iterator[Passage]:
    """The passages of a Markdown page or a notebook."""
    for cell in cells(path):
        in_table = False
        text = DIRECTIVE.sub("", cell.text)
        for token in MarkdownIt("commonmark").enable("table").parse(text):
            if token.type in ("table_open", "table_close"):
                in_table = token.type == "table_open"
            if token.type == "inline" and token.map is not None:
                line = cell.number or token.map[0] + 1
                yield Passage(line, _plain(token.children or []), in_table)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a passage; an abbreviation such as "eq." ends none."""
    sentence = ""
    for part in SENTENCE_END.split(text):
        sentence = f"{sentence} {part}".strip()
        if not ABBREVIATION.search(sentence):
            yield sentence
            sentence = ""
    if sentence:
        yield sentence


def unknown_words(text: str, dictionary: SpellChecker) -> list[str]:
    """The words of a passage that the dictionary lacks.

    Words with a capital letter inside or with digits are left out, and so are words in addresses
    and file names.
    """
    unknown = []
    for word in WORD.findall(text):
        stem = POSSESSIVE.sub("", word)
        is_known = dictionary.known([stem.lower(), word.lower()])
        if len(stem) > 1 and not is_known:
            unknown.append(word)
    return unknown


def faults(root: Path) -> Iterator[str]:
    """One line for each unknown word, long sentence and broken link."""
    dictionary = SpellChecker()
    dictionary.word_frequency.load_words(WORDS.read_text(encoding="utf-8").split())
    for path in documents(root):
        name = path.relative_to(root)
        unit = "line"
        if path.suffix == ".ipynb":
            unit = "cell"
        for passage in passages(path):
            place = f"{name}, {unit} {passage.line}"
            for word in unknown_words(passage.text, dictionary):
                yield f"{place}: unknown word {word!r}"
            for sentence in long_sentences(passage):
                yield f"{place}: a sentence of {word_count(sentence)} words: {sentence}"
    yield from broken_links_below(root)


def long_sentences(passage: Passage) -> list[str]:
    """The sentences of a passage that have too many words; the cells of tables may be long."""
    if passage.in_table:
        return []
    return [sentence for sentence in sentences(passage.text) if word_count(sentence) > LONGEST]


def word_count(text: str) -> int:
    """The number of words; a dash between spaces, for example, is no word."""
    return sum(is_word(part) for part in text.split())


def is_word(text: str) -> bool:
    """Whether a text without spaces has a letter or a digit, or stands for a piece of code."""
    return "`" in text or any(map(str.isalnum, text))


def word_counts(root: Path) -> Iterator[tuple[Path, int]]:
    """Each document with the number of words outside code and tables."""
    for path in documents(root):
        words = [word_count(passage.text) for passage in passages(path) if not passage.in_table]
        yield path.relative_to(root), sum(words)


def _plain(tokens: list[Token]) -> str:
    return "".join(map(_plain_token, tokens))


def _plain_token(token: Token) -> str:
    if token.type == "text":
        return token.content
    return MARKS.get(token.type, "")


def main() -> int:
    """Print the faults, or the numbers of words; return 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="print the number of words")
    if parser.parse_args().count:
        for path, words in word_counts(ROOT):
            print(f"{words:7,d}  {path}")
        return 0
    lines = list(faults(ROOT))
    print("\n".join(lines) or "no faults in the documents")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
