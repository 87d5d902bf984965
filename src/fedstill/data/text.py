"""Texts as token ids: words by a hash, bytes, or as a tokenizer's file says. No id is learned from
texts.

Id 0 is padding. It follows texts that are shorter than others, and is never the id of a word or a
byte.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError, DataError, on_one_line
from fedstill.core.files import digest

BYTES = 257
"""Token ids of ``"bytes"``: 256, and padding."""

PADDING_NAMES = {"[PAD]", "<pad>", "<|pad|>", "[pad]", "<PAD>"}
"""The names of padding in tokenizers' files that do not say which token it is."""


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Texts as token ids."""

    ids: NDArray[np.int64]
    """(n, length), in [0, ``vocabulary``); 0 is padding."""
    vocabulary: int
    cut_share: float
    """The share of texts that had more tokens than ``length``."""
    sha: str = ""
    """The SHA-256 of the tokenizer's file, if one was read."""


def encoded(texts: Sequence[str], tokenizer: str, vocabulary: int, length: int) -> TokenIds:
    """Texts as token ids.

    tokenizer: one of

    - "words": lower case in Unicode's form NFC. Each run of letters, their marks and digits is a
      word, and its id is 1 + the CRC-32 of its UTF-8 bytes modulo (``vocabulary`` - 1), so that two
      words may share one.
    - "bytes": the UTF-8 bytes, each plus 1.
    - a file ``*.json`` of Hugging Face's ``tokenizers``, with the vocabulary that it has. Its ids
      are shifted by 1 where its padding is not 0, so that 0 is padding for every network.

    vocabulary: of words, >= 2. length: tokens of a text that are kept, >= 1.

    Raises ConfigError for another tokenizer, a file that is none, or numbers out of range;
    DataError for a text that is none.

    >>> encoded(["A cat, a cat", ""], "words", 100, 3).ids.tolist()
    [[46, 92, 46], [0, 0, 0]]
    >>> encoded(["Hi"], "bytes", 0, 3).ids.tolist()
    [[73, 106, 0]]
    """
    if length < 1:
        raise ConfigError(f"data.length = {length} must be at least 1 for texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"text {index} is a {type(text).__name__}, not a text; leave it out, or write an "
                "empty one"
            )
    if tokenizer == "words":
        if vocabulary < 2:
            raise ConfigError(
                f"data.vocabulary = {vocabulary} must be at least 2: one id is padding"
            )
        return _padded(_words(texts, vocabulary), len(texts), vocabulary, length)
    if tokenizer == "bytes":
        return _padded(_bytes(texts), len(texts), BYTES, length)
    if tokenizer.endswith(".json"):
        return _by_file(texts, Path(tokenizer), length)
    raise ConfigError(
        f"data.tokenizer = {tokenizer!r:.80} must be 'words', 'bytes' or a file tokenizer.json"
    )


def _words(texts: Sequence[str], vocabulary: int) -> Iterator[Sequence[int]]:
    ids: dict[str, int] = {}
    for index, text in enumerate(texts):
        normal = unicodedata.normalize("NFC", text.lower())
        # ASCII has no marks, and the pattern without them is three times as fast.
        pattern = ASCII_WORD if normal.isascii() else _word()
        words = pattern.findall(normal)
        for word in words:
            if word not in ids:
                ids[word] = 1 + zlib.crc32(_utf8(word, index)) % (vocabulary - 1)
        yield [ids[word] for word in words]


ASCII_WORD = re.compile(r"\w+", re.ASCII)


@functools.cache
def _word() -> re.Pattern[str]:
    """A letter, digit or underscore, and what follows of these and of marks, as vowel signs are in
    Hindi and Thai.
    """
    marks = "".join(
        c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c).startswith("M")
    )
    return re.compile(rf"\w[\w{re.escape(marks)}]*")


def _bytes(texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    for index, text in enumerate(texts):
        yield np.frombuffer(_utf8(text, index), dtype=np.uint8).astype(np.int64) + 1


def _utf8(text: str, index: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text {index} cannot be written as UTF-8: {on_one_line(error)}") from error


def _padded(rows: Iterator[Any], count: int, vocabulary: int, length: int) -> TokenIds:
    """Rows of ids, one a text, cut and padded."""
    ids = np.zeros((count, length), dtype=np.int64)
    cut_count = 0
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row[:length]
        cut_count += len(row) > length
    return TokenIds(ids, vocabulary, cut_count / max(count, 1))


def _by_file(texts: Sequence[str], path: Path, length: int) -> TokenIds:
    """As a file of Hugging Face's ``tokenizers`` says, its special tokens included."""
    tokenizer, sha = _read_tokenizer(path)
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    shift = 0 if _zero_is_padding(tokenizer) else 1
    tokenizer.no_padding()
    ids = np.zeros((len(texts), length), dtype=np.int64)
    cut_count = 0
    try:
        tokenizer.enable_truncation(length)  # keeps the special tokens at a text's end
        # One text at a time: the library's threads for many would outlive a fork.
        for index, text in enumerate(texts):
            tokens = tokenizer.encode(text)
            ids[index, : len(tokens.ids)] = np.asarray(tokens.ids, dtype=np.int64) + shift
            cut_count += bool(tokens.overflowing)
    except Exception as error:  # the class of its errors is Exception itself
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} cannot read these texts: {on_one_line(error)}"
        ) from error
    return TokenIds(ids, size + shift, cut_count / max(len(texts), 1), sha)


def _zero_is_padding(tokenizer: Any) -> bool:
    """Whether the token of id 0 is padding: as the file says, or else by its name."""
    if tokenizer.padding is None or tokenizer.padding.get("pad_id") is None:
        return tokenizer.id_to_token(0) in PADDING_NAMES
    return bool(tokenizer.padding["pad_id"] == 0)


def _read_tokenizer(path: Path) -> tuple[Any, str]:
    """A tokenizer, and the SHA-256 of its file; raises ConfigError for a file that is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} needs Hugging Face's tokenizers: pip install "
            "'fedstill[text]'"
        ) from error
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_str(content.decode())
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} cannot be read: {on_one_line(error)}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} is no file of Hugging Face's tokenizers: "
            f"{on_one_line(error)}"
        ) from error
    if getattr(tokenizer.model, "dropout", None):
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} has dropout, which draws random tokens; set it to null"
        )
    return tokenizer, digest(content)
