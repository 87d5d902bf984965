"""Texts as token ids: hashes of words, bytes, or the tokens of a tokenizer file.

Ids are not learned from texts. Id 0 is padding at the end of shorter texts, and is never the id of
a word or a byte.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.codec import table_of_unique_keys
from fedstill.core.errors import ConfigError, DataError, on_one_line
from fedstill.core.files import digest, read_file

BYTE_IDS = 257
"""The number of token ids of ``"bytes"``: 256, and padding."""

PADDING_NAMES = {"[PAD]", "<pad>", "<|pad|>", "[pad]", "<PAD>"}
"""The names of padding in tokenizer files that do not declare it."""


MAX_TOKENIZER_BYTES = 1 << 27
"""The largest size of a tokenizer file in bytes; those of large language models have up to 34 MB.
"""

MAX_GROWTH = 10_000
"""The largest factor by which a tokenizer may lengthen a text; known tokenizers have 4."""

MOST_SECONDS = 2.0
SECONDS_PER_CHARACTER = 1e-4
"""The processor time that a tokenizer may take per character; known tokenizers take about a
microsecond.
"""

FIRST_CHARACTERS = 128
"""The largest length of a text that is initially encoded as a whole; later, it is doubled."""

SPARE_IDS = 10_000
"""A tokenizer may leave this many ids unused, in addition to the number of ids that it uses."""

INSERTION_KEYS = ("content", "prepend", "replacement", "ids", "single", "pair")
"""The keys of a tokenizer file whose texts or tokens are inserted into a text."""


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Texts as token ids."""

    ids: NDArray[np.int64]
    """The ids (n, length), in [0, ``vocabulary``); 0 is padding."""
    vocabulary: int
    cut_share: float
    """The share of texts with more than ``length`` tokens."""
    sha: str = ""
    """The SHA-256 of the tokenizer file, if there is one."""


def token_ids(texts: Sequence[str], tokenizer: str, vocabulary: int, length: int) -> TokenIds:
    """Encode texts as token ids.

    tokenizer: one of

    - "words": the text is converted to lower case and to Unicode form NFC. Each sequence of
      letters, their marks and digits is a word. Its id is 1 + the CRC-32 of its UTF-8 bytes modulo
      (``vocabulary`` - 1), so two words may share an id.
    - "bytes": the UTF-8 bytes, each plus 1.
    - a file ``*.json`` of Hugging Face's ``tokenizers``, with its own vocabulary. If its padding is
      not 0, its ids are shifted by 1, so that 0 is padding for every network.

    vocabulary: the number of ids for words, >= 2. length: the number of tokens to keep, >= 1.

    Raises ConfigError for an unknown tokenizer, an invalid file, or numbers out of range, and
    DataError for a value that is not a text.

    >>> token_ids(["A cat, a cat", ""], "words", 100, 3).ids.tolist()
    [[46, 92, 46], [0, 0, 0]]
    >>> token_ids(["Hi"], "bytes", 0, 3).ids.tolist()
    [[73, 106, 0]]
    """
    if length < 1:
        raise ConfigError(f"data.length = {length} must be at least 1 for texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"text {index} is a {type(text).__name__}, not a text; remove it, or write an "
                "empty one"
            )
    if tokenizer == "words":
        if vocabulary < 2:
            raise ConfigError(
                f"data.vocabulary = {vocabulary} must be at least 2, because one id is padding"
            )
        return _padded(_ids_of_words(texts, vocabulary), len(texts), vocabulary, length)
    if tokenizer == "bytes":
        return _padded(_ids_of_bytes(texts), len(texts), BYTE_IDS, length)
    if tokenizer.endswith(".json"):
        return _by_file(texts, Path(tokenizer), length)
    raise ConfigError(
        f"data.tokenizer = {tokenizer!r:.80} must be 'words', 'bytes' or a file tokenizer.json"
    )


ASCII_WORD = re.compile(r"\w+", re.ASCII)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    """The pattern of a word: a letter, digit or underscore, followed by any of these and marks.

    Vowel signs of Hindi and Thai are marks, for example.
    """
    characters = map(chr, range(sys.maxunicode + 1))
    marks = "".join(c for c in characters if unicodedata.category(c).startswith("M"))
    return re.compile(rf"\w[\w{re.escape(marks)}]*")


def _ids_of_words(texts: Sequence[str], vocabulary: int) -> Iterator[Sequence[int]]:
    ids: dict[str, int] = {}
    for index, text in enumerate(texts):
        normal = unicodedata.normalize("NFC", text.lower())
        # ASCII has no marks, and the pattern without marks is three times as fast.
        pattern = ASCII_WORD if normal.isascii() else _word_pattern()
        words = pattern.findall(normal)
        for word in words:
            if word not in ids:
                ids[word] = 1 + zlib.crc32(_utf8(word, index)) % (vocabulary - 1)
        yield [ids[word] for word in words]


def _ids_of_bytes(texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    for index, text in enumerate(texts):
        yield np.frombuffer(_utf8(text, index), dtype=np.uint8).astype(np.int64) + 1


def _utf8(text: str, index: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text {index} cannot be written as UTF-8: {on_one_line(error)}") from error


def _padded(rows: Iterator[Any], count: int, vocabulary: int, length: int) -> TokenIds:
    """Truncate and pad rows of ids, one row per text."""
    ids = np.zeros((count, length), dtype=np.int64)
    cut_count = 0
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row[:length]
        cut_count += len(row) > length
    return TokenIds(ids, vocabulary, cut_count / max(count, 1))


def _by_file(texts: Sequence[str], path: Path, length: int) -> TokenIds:
    """Encode texts with a file of Hugging Face's ``tokenizers``, including special tokens."""
    content = _read(path)
    tokenizer = _tokenizer(path, content)
    size = 1 + _largest_id(tokenizer)
    shift = 1
    if _zero_is_padding(tokenizer):
        shift = 0
    tokenizer.no_padding()
    ids = np.zeros((len(texts), length), dtype=np.int64)
    cut_count = 0
    with _library_errors(f"data.tokenizer = {str(path)!r} cannot read these texts"):
        # Truncation keeps the special tokens at the end of a text.
        tokenizer.enable_truncation(length)
        encoder = _TimedEncoder(tokenizer)
        # One text at a time, because the library's threads for batches would survive a fork.
        for index, text in enumerate(texts):
            tokens = encoder.encode(text)
            ids[index, : len(tokens.ids)] = np.asarray(tokens.ids, dtype=np.int64) + shift
            cut_count += bool(tokens.overflowing)
    return TokenIds(ids, size + shift, cut_count / max(len(texts), 1), digest(content))


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """A context that turns errors of Hugging Face's library into ConfigError with a problem.

    The library raises Exception itself. A panic, for example after too many attempts to match a
    regular expression, is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{problem}: {on_one_line(error)}") from error


@dataclass
class _TimedEncoder:
    """Encodes texts with a time limit, because a malicious tokenizer may take very long.

    The time to match a regular expression can grow with a power of the length of a text, and the
    library cannot be interrupted. Therefore, a text that is more than twice as long as all previous
    ones is first encoded in parts. The limit refers to the CPU time of this thread, so that a busy
    machine does not matter.
    """

    tokenizer: Any
    seconds: float = 0.0
    characters: int = 0
    longest: int = FIRST_CHARACTERS

    def encode(self, text: str) -> Any:
        """The tokens of a text; raises TimeoutError if the tokenizer is far too slow."""
        while len(text) > 2 * self.longest:
            self.longest *= 2
            self._encode(text[: self.longest])
        self.longest = max(self.longest, len(text))
        return self._encode(text)

    def _encode(self, text: str) -> Any:
        began = time.thread_time()
        tokens = self.tokenizer.encode(text)
        self.seconds += time.thread_time() - began
        self.characters += len(text)
        if self.seconds > MOST_SECONDS + SECONDS_PER_CHARACTER * self.characters:
            raise TimeoutError(
                f"{self.characters:,} characters took {self.seconds:.1f} s of processor time; its "
                "regular expressions are too slow"
            )
        return tokens


def _check_growth(content: bytes) -> None:
    """Raise ValueError for a tokenizer file that is too large or lengthens texts too much.

    Its normalisers replace characters by texts, one after another, so a file of a few lines could
    expand a word to terabytes. Duplicate keys are rejected, because the library may use a different
    one of the two values than this check.
    """
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ValueError(f"it has more than {MAX_TOKENIZER_BYTES:,} bytes")
    tree = json.loads(content, object_pairs_hook=table_of_unique_keys)
    if not isinstance(tree, Mapping):
        raise TypeError("it is not a JSON object")
    growth = 1.0
    for key in ("normalizer", "pre_tokenizer", "post_processor"):
        for part in _nested_parts(tree.get(key)):
            growth *= max(1.0, _growth_by(part))
            if growth > MAX_GROWTH:
                raise ValueError(f"its {key} lengthens texts by a factor of more than {MAX_GROWTH}")


def _nested_parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """A part of a tokenizer, and all nested parts."""
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _nested_parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _nested_parts(item)


def _growth_by(part: Mapping[str, Any]) -> float:
    """The largest factor by which a part of a tokenizer lengthens a text."""
    insertions = [part.get(key) for key in INSERTION_KEYS]
    longest = max((len(text) for text in insertions if isinstance(text, (str, list))), default=0)
    pattern = part.get("pattern")
    if isinstance(pattern, Mapping) and isinstance(pattern.get("String"), str):
        return longest / max(1, len(pattern["String"]))
    if pattern is not None:
        # A regular expression may match the empty text between any two characters.
        return 1.0 + longest
    return float(longest)


def _largest_id(tokenizer: Any) -> int:
    """The largest id of a token; 0 without tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)


def _zero_is_padding(tokenizer: Any) -> bool:
    """Whether the token with id 0 is padding, according to the file or else to its name."""
    if tokenizer.padding is None or tokenizer.padding.get("pad_id") is None:
        return tokenizer.id_to_token(0) in PADDING_NAMES
    return bool(tokenizer.padding["pad_id"] == 0)


def tokenizer_digest(tokenizer: str) -> str:
    """The SHA-256 of a tokenizer file; "" for other tokenizers, and for a file that is absent."""
    path = Path(tokenizer)
    if not tokenizer.endswith(".json") or not path.is_file():
        return ""
    return digest(_read(path))


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} cannot be read: {on_one_line(error)}"
        ) from error


def _tokenizer(path: Path, content: bytes) -> Any:
    """The tokenizer of Hugging Face's library in a file; raises ConfigError if it is invalid."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} needs Hugging Face's tokenizers: pip install "
            "'fedstill[text]'"
        ) from error
    with _library_errors(
        f"data.tokenizer = {str(path)!r} is not a file of Hugging Face's tokenizers"
    ):
        _check_growth(content)
        tokenizer = Tokenizer.from_str(content.decode())
    largest_id = _largest_id(tokenizer)
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if largest_id > 2 * tokens + SPARE_IDS:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} has {tokens:,} tokens with ids up to {largest_id:,}; "
            "a network would need an entry for each id"
        )
    if getattr(tokenizer.model, "dropout", None):
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} has dropout, which draws random tokens; set it to null"
        )
    return tokenizer
