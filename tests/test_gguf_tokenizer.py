"""Tokenizers rebuilt from GGUF metadata, against a second implementation written here without `tokenizers`."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader
from slow_bpe import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Oracle,
    byte_characters,
    cl100k_words,
    gpt2_words,
    llama_oracle,
    many_texts,
    smollm_words,
)
from tiny_tokenizers import byte_fallback_json, byte_level_json

from vramjax.errors import TextError
from vramjax.text.gguf_tokenizer import build_tokenizer
from vramjax.text.tokenizer import Tokenizer


def gpt2_metadata(pre: str = "gpt-2", **extra: object) -> dict[str, object]:
    """The metadata that a converter would write for the tests' byte-level tokenizer."""
    data = json.loads(byte_level_json())
    vocab = data["model"]["vocab"] | {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    special = {entry["content"]: entry["special"] for entry in data["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [NORMAL if t not in special else CONTROL if special[t] else USER_DEFINED for t in tokens],
        "merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | extra).items() if value is not None}


def llama_metadata(**extra: object) -> dict[str, object]:
    vocab = json.loads(byte_fallback_json())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL] + [BYTE] * 256
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types + [NORMAL] * (len(tokens) - len(types)),
        "scores": [0.0] * len(types) + [-float(i) for i in range(len(tokens) - len(types))],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | extra).items() if value is not None}


def mismatches(tokenizer: Tokenizer, oracle: Callable[[str], list[int]], texts: list[str]) -> list[str]:
    return [text for text in texts if tokenizer.encode(text, add_bos=False) != oracle(text)]


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_gguf: Path) -> dict[str, object]:
    fields = GGUFReader(smollm2_gguf).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer(build_tokenizer(smollm2_metadata), name="SmolLM2")


def test_smollm2_agrees_on_thousands_of_texts(smollm2_tokenizer: Tokenizer, smollm2_metadata: dict[str, object]):
    oracle = Oracle(smollm2_metadata, smollm_words)
    texts = many_texts(6000, oracle.added)
    assert len(texts) >= 6000
    assert mismatches(smollm2_tokenizer, oracle.encode, texts) == []
    # Digits are what tells this pre-tokenizer from GPT-2's.
    assert mismatches(smollm2_tokenizer, Oracle(smollm2_metadata, gpt2_words).encode, ["a  1"]) == ["a  1"]


def test_smollm2_streams_and_decodes(smollm2_tokenizer: Tokenizer, smollm2_metadata: dict[str, object]):
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    missing = {byte for byte, char in enumerate(byte_characters()) if char not in tokens}
    assert len(missing) == 21
    for text in many_texts(1500, []):
        ids = smollm2_tokenizer.encode(text)
        stream = smollm2_tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == smollm2_tokenizer.decode(ids)
        if not missing & {*text.encode()}:
            assert smollm2_tokenizer.decode(ids) == text


def test_smollm2_golden_ids(smollm2_tokenizer: Tokenizer):
    assert smollm2_tokenizer.encode("Once upon a time") == [6403, 1980, 253, 655]
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    golden = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert smollm2_tokenizer.encode(chat) == golden  # no BOS is added, and the one that is there is not doubled
    assert smollm2_tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."
    assert smollm2_tokenizer.stop_ids == {2}
    assert smollm2_tokenizer.bos_id == 1
    assert smollm2_tokenizer.vocab_size == 49152
    # The template begins with a system message of its own where none is given, so the golden prompt is not its output.
    assert smollm2_tokenizer.chat_template is not None
    rendered = smollm2_tokenizer.chat_template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert rendered.endswith(chat)
    assert smollm2_tokenizer.encode(rendered)[-len(golden) :] == golden
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", gpt2_words),
        ("smollm", smollm_words),
        ("llama-bpe", lambda text: cl100k_words(text, 3)),
        ("llama3", lambda text: cl100k_words(text, 3)),
        ("llama-v3", lambda text: cl100k_words(text, 3)),
        ("qwen2", lambda text: cl100k_words(unicodedata.normalize("NFC", text), 1)),
    ],
)
def test_pre_tokenizers_agree(pre: str, words: Callable[[str], list[str]]):
    metadata = gpt2_metadata(pre)
    oracle = Oracle(metadata, words, whole=pre.startswith("llama"))
    tokenizer = Tokenizer(build_tokenizer(metadata))
    assert mismatches(tokenizer, oracle.encode, many_texts(3000, oracle.added)) == []


def test_words_of_each_pre_tokenizer():
    text = "I'VE 12345 of\n\n  x's"
    assert gpt2_words(text) == ["I", "'", "VE", " 12345", " of", "\n\n ", " x", "'s"]
    assert smollm_words(text) == ["I", "'", "VE", " ", "1", "2", "3", "4", "5", " of", "\n\n ", " x", "'s"]
    assert cl100k_words(text, 3) == ["I", "'VE", " ", "123", "45", " of", "\n\n", " ", " x", "'s"]
    assert cl100k_words(text, 1) == ["I", "'VE", " ", "1", "2", "3", "4", "5", " of", "\n\n", " ", " x", "'s"]


def test_llama3_takes_whole_words():
    metadata = gpt2_metadata("llama-bpe")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list)
    tokens.append("Ġzyzzyva")
    types.append(NORMAL)
    assert Tokenizer(build_tokenizer(metadata)).encode(" zyzzyva", add_bos=False) == [len(tokens) - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer(build_tokenizer(metadata)).encode(" zyzzyva")) > 1


@pytest.mark.parametrize("prefix", [True, False, None])
def test_sentencepiece_style(prefix: bool | None):
    metadata = llama_metadata(add_space_prefix=prefix)
    tokenizer = Tokenizer(build_tokenizer(metadata))
    texts = [text for text in many_texts(3000, []) if "▁" not in text]
    lead = "" if prefix is False else "▁"
    assert mismatches(tokenizer, lambda text: llama_oracle(metadata, text, prefix=lead), texts) == []
    for text in texts[:1000]:
        ids = tokenizer.encode(text)
        assert ids[0] == 1  # SentencePiece models begin with BOS unless the file says otherwise
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == text
    assert tokenizer.bos_id == 1
    assert tokenizer.stop_ids == {2, 3}  # </s>, and <|eot_id|> by its name


def test_merges_of_a_sentencepiece_file_are_taken_as_they_are():
    model = json.loads(byte_fallback_json())["model"]
    left, right = next(merge for merge in model["merges"] if "▁" not in "".join(merge))
    tokenizer = Tokenizer(build_tokenizer(llama_metadata(merges=[f"{left} {right}"], scores=None)))
    pair, space = model["vocab"][left + right], model["vocab"]["▁"]
    assert tokenizer.encode(f"{left}{right} {left}{right}", add_bos=False) == [space, pair, space, pair]


def test_byte_tokens_are_not_made_from_text():
    tokenizer = Tokenizer(build_tokenizer(llama_metadata()))
    ids = tokenizer.encode("<0x41>", add_bos=False)
    assert len(ids) > 2
    assert tokenizer.decode(ids) == "<0x41>"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (gpt2_metadata(), False),
        (gpt2_metadata(add_bos_token=True), True),
        (gpt2_metadata(add_bos_token=True, bos_token_id=None), False),
        (gpt2_metadata("qwen2"), False),
        (gpt2_metadata("llama-bpe"), True),
        (gpt2_metadata("llama-bpe", add_bos_token=False), False),
        (llama_metadata(), True),
        (llama_metadata(add_bos_token=False), False),
    ],
)
def test_who_begins_with_bos(metadata: dict[str, object], expected: bool):
    files = build_tokenizer(metadata)
    tokenizer = Tokenizer(files)
    assert (tokenizer.encode("a")[:1] == [1]) is expected
    assert tokenizer.encode("<s>a")[:2].count(1) == 1
    # tokenizer.json alone says it too, for whoever reads nothing else.
    assert (Tokenizer({"tokenizer.json": files["tokenizer.json"]}).encode("a")[:1] == [1]) is expected


def test_ids_and_types_are_carried_over():
    metadata = gpt2_metadata(eot_token_id=3, unknown_token_id=0, padding_token_id=2)
    files = build_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokenizer = Tokenizer(files)
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.stop_ids == {2, 3}
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    config = json.loads(files["tokenizer_config.json"])
    roles = {"bos": "<s>", "eos": "</s>", "eot": "<|eot_id|>", "unk": "<unk>", "pad": "</s>"}
    assert {role: config[f"{role}_token"] for role in roles} == roles
    think = tokens.index("<think>")  # user-defined: parsed, and shown
    assert tokenizer.encode("a<think>")[-1] == think
    assert tokenizer.decode([think, 2]) == "<think>"
    assert tokenizer.decode([think, 2], skip_special_tokens=False) == "<think></s>"
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(len(tokens)))


def test_chat_templates_are_carried_over():
    metadata = gpt2_metadata()
    assert Tokenizer(build_tokenizer(metadata)).chat_template is None
    metadata["tokenizer.chat_template"] = "{{ bos_token }}D"
    template = Tokenizer(build_tokenizer(metadata)).chat_template
    assert template is not None
    assert template.render([{"role": "user"}]) == "<s>D"
    metadata |= {"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]}
    template = Tokenizer(build_tokenizer(metadata)).chat_template
    assert template is not None
    assert template.render([{"role": "user"}], tools=[1]) == "T"
    assert template.render([{"role": "user"}]) == "<s>D"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tokenizer model is None; expected gpt2"),
        (gpt2_metadata() | {"tokenizer.ggml.model": "t5"}, "tokenizer model is 't5'; expected gpt2"),
        (gpt2_metadata("deepseek-llm"), "pre-tokenizer is 'deepseek-llm' .* expected one of gpt-2, smollm, llama-bpe"),
        (gpt2_metadata("default"), "pre-tokenizer is 'default'"),
        (gpt2_metadata("tekken"), "pre-tokenizer is 'tekken'"),
        (gpt2_metadata() | {"tokenizer.ggml.pre": None}, "pre-tokenizer is None"),
        (gpt2_metadata(tokens=[]), "no list of texts tokenizer.ggml.tokens"),
        (gpt2_metadata(tokens=[b"a"]), "no list of texts tokenizer.ggml.tokens"),
        (gpt2_metadata(tokens=["a", "b", "a"]), "token 'a' as ids 0 and 2"),
        (gpt2_metadata(token_type=[1, 1]), "token_type has 2 entries; expected one for each"),
        (gpt2_metadata(token_type=1), "token_type has int entries"),
        (gpt2_metadata(merges=None), "no tokenizer.ggml.merges"),
        (gpt2_metadata(merges=["a b c"]), r"merges\[0\] is 'a b c'; expected two tokens"),
        (gpt2_metadata(merges=["a"]), r"merges\[0\] is 'a'"),
        (gpt2_metadata(merges=["q zzz"]), "cannot be rebuilt: .*zzz"),
        (gpt2_metadata(eos_token_id=10**6), "eos_token_id is 1000000; expected 0 to "),
        (gpt2_metadata(eos_token_id=-1), "eos_token_id is -1"),
        (llama_metadata(scores=None), "neither tokenizer.ggml.scores nor merges"),
        (llama_metadata(scores=[0.0]), "scores has 1 entries"),
        (llama_metadata(tokens=["a", "b", "c"], token_type=None, scores=["0"] * 3), "scores holds a str"),
        (gpt2_metadata(tokens=["a"], token_type=["1"]), "token_type holds a str; expected numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_rebuilt_is_refused(metadata: dict[str, object], message: str):
    with pytest.raises(TextError, match=message) as info:
        build_tokenizer(metadata)
    assert "\n" not in str(info.value)
