"""A row with images becomes the text that LLaVA was trained on, and tokens of which the answers are marked."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data import Tokenizer, image_template, load_tokenizer, train_tokenizer
from lightning_megatron.data.image_chats import (
    IMAGE,
    Conversation,
    conversation_of,
    encode_conversations,
    encode_prompt,
)

FEATURES = 3
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
# As those of llava-hf's models: parts alone are written, and the images of a turn first.
PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
TEXT_TEMPLATE = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
LLAVA_ROW = {
    "id": "1",
    "image": "a.png",
    "conversations": [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Yes."},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer([SYSTEM, "What is it? A cat. Sure? Yes. USER ASSISTANT"] * 4, 330, path, (IMAGE,))


def learnt(tokenizer: Tokenizer, template: Any, *rows: Any) -> list[tuple[str, str]]:
    """The whole text of each row, and what of it is marked."""
    conversations = [conversation_of(row) for row in rows]
    found = encode_conversations(conversations, tokenizer, template, FEATURES)
    return [
        (tokenizer.decode(s.ids), tokenizer.decode([i for i, m in zip(s.ids, s.is_marked, strict=True) if m]))
        for s in found
    ]


def test_a_row_of_llava_is_written_as_llava_1_5_was_tuned(tokenizer: Tokenizer) -> None:
    template = image_template("vicuna", tokenizer, "")
    end = tokenizer.decode([tokenizer.end_of_text])
    [(text, marked)] = learnt(tokenizer, template, LLAVA_ROW)
    images = IMAGE * FEATURES
    asked = f"{SYSTEM} USER: {images}\nWhat is it? ASSISTANT:"
    assert text == f"{asked} A cat.{end}USER: Sure? ASSISTANT: Yes.{end}"
    assert marked == f" A cat.{end} Yes.{end}"
    first = Conversation(messages=conversation_of(LLAVA_ROW).messages[:1], images=["a.png"])
    assert tokenizer.decode(encode_prompt(first, tokenizer, template, FEATURES)) == asked
    system = {"conversations": [{"from": "system", "value": "Be brief."}, *LLAVA_ROW["conversations"]], "image": "a"}
    assert learnt(tokenizer, template, system)[0][0].startswith("Be brief. USER: <image>")


def test_a_plain_row_is_its_images_and_the_answer(tokenizer: Tokenizer) -> None:
    template = image_template("plain", tokenizer, "")
    row = {**LLAVA_ROW, "conversations": LLAVA_ROW["conversations"][:2]}
    assert learnt(tokenizer, template, row) == [(IMAGE * FEATURES + "A cat.\n", "A cat.\n")]
    asked = Conversation(messages=conversation_of(row).messages[:1], images=["a.png"])
    assert encode_prompt(asked, tokenizer, template, 2) == [tokenizer.token_id(IMAGE)] * 2


def folder_with(tokenizer: Tokenizer, template: str | None, folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer.engine.to_str())
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_a_template_of_a_tokenizer_gets_parts_where_it_wants_parts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = folder_with(tokenizer, PARTS_TEMPLATE, tmp_path)
    [(text, marked)] = learnt(tokenizer, image_template("tokenizer", tokenizer, folder), LLAVA_ROW)
    # The line break after the image is the template's, once.
    assert text == f"USER: {IMAGE * FEATURES}\nWhat is it? ASSISTANT: A cat. USER: Sure? ASSISTANT: Yes. "
    assert marked.split() == ["A", "cat.", "Yes."]
    folder_with(tokenizer, TEXT_TEMPLATE, tmp_path)
    [(text, _)] = learnt(tokenizer, image_template("tokenizer", tokenizer, folder), LLAVA_ROW)
    assert text.startswith(f"[user]{IMAGE * FEATURES}\nWhat is it?[assistant]A cat.")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no chat template; take 'vicuna' or 'plain'"):
        image_template("tokenizer", tokenizer, folder)


PARTS = [
    {"type": "text", "text": "Compare ", "image": None},
    {"type": "image", "text": None, "image": "a.png"},
    {"type": "image", "text": None, "path": "b.png"},
]


@pytest.mark.parametrize(
    ("row", "text", "images"),
    [
        ({"messages": [{"role": "user", "content": PARTS}]}, "Compare <image>\n<image>\n", ["a.png", "b.png"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["c.png"]},
            "<image>\n",
            ["c.png"],
        ),
        ({"messages": [{"role": "user", "content": "<image>?"}], "image": "d.png"}, "<image>?", ["d.png"]),
        ({"conversations": [{"from": "human", "value": "Hello"}], "image": None}, "Hello", []),
        (
            {"conversations": [{"from": "human", "value": "<image><image>"}], "image": ["a", "b"]},
            "<image><image>",
            ["a", "b"],
        ),
    ],
)
def test_rows_of_every_form_have_text_and_images(row: dict[str, Any], text: str, images: list[str]) -> None:
    conversation = conversation_of(row)
    assert conversation.messages[0]["content"] == text
    assert conversation.images == images


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"text": "no turns"}, r"needs 'conversations' .* has columns 'text'"),
        ({**LLAVA_ROW, "image": None}, r"its text has 1 <image>, and its images are 0"),
        ({**LLAVA_ROW, "images": ["a", "b"]}, r"its text has 1 <image>, and its images are 2 \(a, b\)"),
        ({**LLAVA_ROW, "image": 3}, r"its image 0 is 3; it must be the name of a file"),
        ({"conversations": [{"from": "robot", "value": "hi"}]}, "a turn is of 'robot'; it must be of one of 'human'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "must have text"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "must be of type 'text' or 'image'"),
    ],
)
def test_a_row_that_is_no_conversation_is_reported(row: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        conversation_of(row)


def test_a_tokenizer_without_the_token_of_images_gets_it_after_its_others(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    plain = train_tokenizer(["some words"], 300, path)
    more = plain.with_special_token(IMAGE)
    assert plain.token_id(IMAGE) is None and more.token_id(IMAGE) == plain.vocab_size
    assert more.end_of_text == plain.end_of_text and more.with_special_token(IMAGE) is more
    [(ids, _)] = more.encode_spelled(["some<image>words"])
    assert ids.count(plain.vocab_size) == 1
    assert load_tokenizer(path).vocab_size == plain.vocab_size


def test_the_token_that_begins_a_text_stands_in_front_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    begins = tokenizer.with_special_token("<s>")
    opening = begins.token_id("<s>")
    begins.__dict__["opening"] = [opening]
    template = image_template("plain", begins, "")
    for said, count in (("A cat.", 1), ("<s>A cat.", 1)):
        row = {"conversations": [{"from": "gpt", "value": said}]}
        [sample] = encode_conversations([conversation_of(row)], begins, template, FEATURES)
        assert sample.ids[0] == opening and sample.ids.count(opening) == count
