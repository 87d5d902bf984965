"""Texts as token ids: each tokenizer against its definition, padding, cutting, and what is refused
in one line.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fedstill.core.errors import ConfigError, DataError
from fedstill.data import tokens
from fedstill.data.sources import load_dataset
from fedstill.data.tokens import token_ids

TEXTS = ["The cat sat on the mat.", "", "Ünïcode, 42 — déjà vu!", "   \t\n", "a"]


def hashed(words: list[str], vocabulary: int) -> list[int]:
    """The ids of words by their definition; 0 is the padding."""
    return [1 + binascii.crc32(word.encode()) % (vocabulary - 1) for word in words]


def test_words_are_hashed_by_crc_32() -> None:
    got = token_ids(TEXTS, "words", 1000, 6)

    assert got.ids.dtype == np.int64
    assert got.ids[0].tolist() == hashed(["the", "cat", "sat", "on", "the", "mat"], 1000)
    assert got.ids[2].tolist()[:2] == hashed(["ünïcode", "42"], 1000)
    assert got.ids[1].tolist() == [0] * 6
    assert got.ids[3].tolist() == [0] * 6
    assert got.vocabulary == 1000
    assert got.cut_share == 0.0
    assert got.sha == ""


def test_marks_belong_to_their_word_and_one_spelling_is_one_word() -> None:
    words = ["की", "कि", "कु", "के", "का", "ที่", "ทั้"]
    ids = token_ids([" ".join(words)], "words", 8192, 8).ids
    assert ids[0].tolist() == [*hashed(words, 8192), 0]

    spellings = ["caf\u00e9", "cafe\u0301", "cafe"]
    composed, decomposed, plain = token_ids(spellings, "words", 8192, 2).ids.tolist()
    assert composed == decomposed != plain

    marks_alone = token_ids(["\u0301 \ufe0f"], "words", 8192, 2)
    assert marks_alone.ids.tolist() == [[0, 0]], "a mark begins no word"


def test_words_of_ascii_are_the_same_words_in_other_texts() -> None:
    text = "".join(map(chr, range(128))) + " Don't stop_at 3.5e2 x-ray\tNEW\x1fline "
    ids = token_ids([text, f"{text}\u0301\u00e9", f"{text} \u4e2d"], "words", 100, 24).ids
    count = np.count_nonzero(ids[0])
    assert count == 13
    assert (ids[1:, :count] == ids[0, :count]).all()


def test_bytes_are_bytes() -> None:
    got = token_ids(TEXTS, "bytes", 5, 40)
    for text, row in zip(TEXTS, got.ids, strict=True):
        encoded = row[row > 0] - 1
        assert bytes(encoded.tolist()) == text.encode()
        assert (row[len(encoded) :] == 0).all()
    assert got.vocabulary == 257


@pytest.mark.parametrize(
    ("tokenizer", "length", "cut"), [("words", 4, 1 / 5), ("bytes", 2, 3 / 5), ("words", 6, 0.0)]
)
def test_long_texts_are_cut_and_counted(tokenizer: str, length: int, cut: float) -> None:
    got = token_ids(TEXTS, tokenizer, 50, length)
    assert got.ids.shape == (5, length)
    assert got.cut_share == pytest.approx(cut)
    assert (got.ids == token_ids(TEXTS, tokenizer, 50, 60).ids[:, :length]).all()


def test_ids_are_below_the_vocabulary_however_small_it_is() -> None:
    texts = [" ".join(f"w{i}" for i in range(200))]
    for vocabulary in (2, 3, 17):
        ids = token_ids(texts, "words", vocabulary, 200).ids
        assert set(ids.flatten().tolist()) == set(range(1, vocabulary))


def test_no_texts_at_all() -> None:
    got = token_ids([], "words", 10, 3)
    assert got.ids.shape == (0, 3)
    assert got.cut_share == 0.0


def written(folder: Path, padding: int | None, dropout: float | None = None) -> Path:
    """A tokenizer's file of seven words, whose padding has some id, or none."""
    pytest.importorskip("tokenizers")
    words = ["[UNK]", "the", "cat", "sat", "on", "mat"]
    if padding is not None:
        words.insert(padding, "[PAD]")
    model: dict[str, object] = {
        "type": "WordLevel",
        "vocab": {w: i for i, w in enumerate(words)},
        "unk_token": "[UNK]",
    }
    if dropout:
        model = {
            "type": "BPE",
            "dropout": dropout,
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": ["a b"],
        }
    file = {
        "version": "1.0",
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    file |= {
        "added_tokens": [],
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "decoder": None,
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**file, "model": model}))
    return path


@pytest.mark.parametrize("padding", [0, 3, None])
def test_a_tokenizers_file_has_padding_0_whatever_it_has_itself(
    tmp_path: Path, padding: int | None
) -> None:
    path = written(tmp_path, padding)
    got = token_ids(["The cat sat", "the dog", ""], str(path), 9999, 4)
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    shift = int(padding != 0)
    the, cat, sat, unknown = (vocabulary[word] + shift for word in ("the", "cat", "sat", "[UNK]"))
    assert got.ids[0].tolist() == [the, cat, sat, 0]
    assert got.ids[1].tolist() == [the, unknown, 0, 0]
    assert got.ids[2].tolist() == [0] * 4
    assert got.vocabulary == len(vocabulary) + shift
    assert got.sha == hashlib.sha256(path.read_bytes()).hexdigest()
    assert token_ids(["the cat", "the cat sat on"], str(path), 0, 3).cut_share == 0.5


def test_texts_are_encoded_again_after_the_tokenizer_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    rows = [f"the cat sat,{row % 2}" for row in range(10)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    fields = {"tokenizer": str(tmp_path / "tokenizer.json"), "length": 4}

    written(tmp_path, 0)
    first = load_dataset(tmp_path / "texts.csv", **fields)
    written(tmp_path, 3)
    second = load_dataset(tmp_path / "texts.csv", **fields)

    assert first.about.tokenizer_sha != second.about.tokenizer_sha
    assert first.train.values[0].tolist() == [2, 3, 4, 0]
    assert second.train.values[0].tolist() == [2, 3, 5, 0]


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "length", "message"),
    [
        (
            "letters",
            10,
            4,
            "data.tokenizer = 'letters' must be 'words', 'bytes' or a file tokenizer.json",
        ),
        ("words", 1, 4, "data.vocabulary = 1 must be at least 2"),
        ("words", 10, 0, "data.length = 0 must be at least 1"),
    ],
)
def test_wrong_settings_are_one_line(
    tokenizer: str, vocabulary: int, length: int, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        token_ids(TEXTS, tokenizer, vocabulary, length)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{}", "is not a file of Hugging Face's tokenizers"),
        ("\xff", "is not a file of Hugging"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_line(
    tmp_path: Path, content: str | None, message: str
) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "own.json"
    if content is not None:
        path.write_bytes(content.encode("latin1"))
    with pytest.raises(ConfigError) as raised:
        token_ids(TEXTS, str(path), 0, 4)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_draws_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has dropout"):
        token_ids(TEXTS, str(written(tmp_path, None, dropout=0.5)), 0, 4)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "text 1 is a NoneType"), (3, "text 1 is a int")]
)
def test_what_is_no_text_is_named(text: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        token_ids(["a", text], "words", 10, 4)  # type: ignore[list-item]


def test_half_a_character_is_named() -> None:
    with pytest.raises(DataError, match="text 1"):
        token_ids(["a", "\ud800"], "bytes", 10, 4)


def bomb(*normalizers: dict[str, object], **fields: object) -> dict[str, object]:
    """A tokenizer of words with these normalisers."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": list(normalizers)},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
        **fields,
    }


def replacing(content: str, **pattern: str) -> dict[str, object]:
    """A normaliser that replaces the matches of a pattern."""
    return {"type": "Replace", "pattern": pattern, "content": content}


BOMBS = {
    "texts that grow tenfold twelve times": bomb(*[replacing("a" * 10, String="a")] * 12),
    "texts between all characters": bomb(*[replacing("aa", Regex="")] * 30),
    "one huge text": bomb(replacing("a" * 1_000_000, String="a")),
    "a huge id": bomb(
        model={"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 2**32 - 1}, "unk_token": "[UNK]"}
    ),
    "endless special tokens": bomb(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[UNK]", "type_id": 0}}] * 20_000,
            "pair": [],
            "special_tokens": {"[UNK]": {"id": "[UNK]", "ids": [0], "tokens": ["[UNK]"]}},
        }
    ),
    "no table": [],
}


@pytest.mark.parametrize("attack", BOMBS)
def test_a_tokenizers_file_cannot_exhaust_the_memory(attack: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(BOMBS[attack]))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        token_ids(["a a a"], str(path), 0, 4)


def test_a_tokenizers_file_is_read_in_one_way(tmp_path: Path) -> None:
    """Two readers could take another one of two equal keys."""
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(bomb())[:-1] + ', "normalizer": null}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        token_ids(["a"], str(path), 0, 4)


def test_usual_normalisers_are_no_bomb(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    usual = [replacing("...", String="…"), replacing("a", Regex=" {2,}"), {"type": "NFKC"}]
    path.write_text(json.dumps(bomb(*usual, {"type": "Prepend", "prepend": "a"})))
    assert token_ids(["a"], str(path), 0, 4).vocabulary == 3


def splitting(expression: str) -> dict[str, object]:
    """A tokenizer that splits texts at what an expression matches."""
    pattern = {"Regex": expression}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return bomb(pre_tokenizer=split)


SLOW = {
    "a power of two": ("(a|a)*[^a]$", "a" * 60 + "bb"),
    "the third power": ("a*a*(?!a|$)", "a" * 100_000),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("attack", SLOW)
def test_an_expression_of_a_tokenizers_file_cannot_take_forever(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would take days for this text."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokens, "MOST_SECONDS", 0.02)
    monkeypatch.setattr(tokens, "SECONDS_PER_CHARACTER", 1e-5)
    expression, text = SLOW[attack]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(splitting(expression)))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        token_ids([text], str(path), 0, 4)


def test_long_texts_are_not_slow_with_the_expression_of_gpt_2(tmp_path: Path) -> None:
    """The parts of a long text that are tried first leave no trace."""
    pytest.importorskip("tokenizers")
    expression = r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(splitting(expression)))
    texts = ["a", "a b " * 20_000, "b"]
    together = token_ids(texts, str(path), 0, 8)
    alone = [token_ids([text], str(path), 0, 8).ids[0].tolist() for text in texts]
    assert together.ids.tolist() == alone
    assert together.cut_share == 1 / 3
