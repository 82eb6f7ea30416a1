"""Roles and sentinels are found by name, words by how their pieces begin."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from lightning_megatron.data import FastTokenizer, Tokenizer, WordStarts, sentinels, special_tokens, train_tokenizer

ROLES = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    [ids] = tokenizer.encode([text])
    cuts = np.flatnonzero(WordStarts(tokenizer)(np.array(ids)))
    return [tokenizer.engine.decode([int(i) for i in part]) for part in np.split(np.array(ids), cuts[1:])]


def test_a_trained_tokenizer_has_the_special_tokens_asked_for(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b"], 300, tmp_path / "t.json", (*ROLES, "<extra_id_0>", "<extra_id_1>"))
    found = special_tokens(tokenizer)
    assert {role: tokenizer.pieces()[i] for role, i in found.items()} == {
        "class": "[CLS]",
        "separator": "[SEP]",
        "mask": "[MASK]",
        "padding": "[PAD]",
    }
    assert [tokenizer.pieces()[i] for i in sentinels(tokenizer)] == ["<extra_id_0>", "<extra_id_1>"]
    assert set(found.values()) | set(sentinels(tokenizer)) | {tokenizer.end_of_text} == set(tokenizer.special_ids())
    # Spelled out in a text they are text.
    assert not set(tokenizer.encode(["[MASK]"])[0]) & set(tokenizer.special_ids())
    with pytest.raises(ValueError, match=r"vocab_size \(260\) must be at least 261: .* and 4 special tokens"):
        train_tokenizer(["a b"], 260, tmp_path / "t.json", ROLES)


def test_what_a_tokenizer_lacks_is_named_at_once(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b"], 300, tmp_path / "t.json", ("[CLS]", "</s>"))
    with pytest.raises(ValueError, match=r"no token for mask \(\[MASK\] or <mask>\), padding \(\[PAD\] or <pad>\)"):
        special_tokens(tokenizer)
    assert special_tokens(tokenizer, ("separator",)) == {"separator": tokenizer.token_id("</s>")}
    with pytest.raises(ValueError, match="has no sentinels"):
        sentinels(tokenizer)


def test_words_are_whole_for_byte_level_and_for_wordpiece(tmp_path: Path) -> None:
    text = "walking walked talked"
    byte_level = train_tokenizer([text] * 3, 264, tmp_path / "t.json")
    assert words_of(byte_level, text) == ["walking", " walked", " talked"]
    vocabulary = {piece: i for i, piece in enumerate(["<|endoftext|>", "[UNK]", "walk", "##ing", "##ed", "t", "##alk"])}
    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    engine.decoder = tokenizers.decoders.WordPiece()
    assert words_of(FastTokenizer(engine, "<|endoftext|>"), text) == ["walking", "walked", "talked"]


def test_signs_are_words_of_their_own_where_spaces_are_marked(tmp_path: Path) -> None:
    text = "self.walk(walking, 12) # été"
    tokenizer = train_tokenizer([text, "walking walked"] * 3, 270, tmp_path / "t.json")
    assert words_of(tokenizer, text) == ["self", ".", "walk", "(", "walking", ",", " 12", ")", " #", " été"]
