"""What tokenizer files mean: one BOS, the stop ids, special tokens, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import LINES, byte_fallback_json, byte_level_json

from vramjax.errors import TextError
from vramjax.text.tokenizer import Tokenizer

UNK, BOS, EOS, EOT = 0, 1, 2, 3


def _with_bos(tokenizer_json: str, *, suffix: bool = False) -> str:
    """With the post-processor that puts <s> first (and, if `suffix`, </s> last)."""
    data = json.loads(tokenizer_json)
    tokens = {"<s>": BOS, "</s>": EOS}
    last = [{"SpecialToken": {"id": "</s>", "type_id": 0}}] if suffix else []
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text, *last],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in tokens.items()},
    }
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    data["post_processor"] = {"type": "Sequence", "processors": [level, template]}
    return json.dumps(data)


def _tokenizer(tokenizer_json: str | None = None, **files: dict[str, object] | str) -> Tokenizer:
    texts = {f"{name}.json": json.dumps(data) for name, data in files.items() if not isinstance(data, str)}
    texts |= {f"{name}.jinja": data for name, data in files.items() if isinstance(data, str)}
    return Tokenizer({"tokenizer.json": tokenizer_json or byte_level_json(), **texts})


def _write(path: Path, **files: object) -> Path:
    (path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    for name, data in files.items():
        (path / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    return path


def test_reads_a_directory(tmp_path):
    _write(tmp_path, tokenizer_config={"eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": "a"})
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}", encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.bos_id == BOS
    assert tokenizer.stop_ids == {EOS, EOT}
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "Hi"}]) == "<s>Hi"
    assert tokenizer.vocab_size == 1 + max(tokenizer._backend.get_vocab().values())
    ids = tokenizer.encode("Once upon a time")
    assert BOS not in ids
    assert tokenizer.decode(ids) == "Once upon a time"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_text_survives(text: str):
    # <, > and | are left out: added tokens take spaces along or are skipped.
    text = text.translate({ord(c): None for c in "<>|é日本"})
    for source in (byte_level_json(), byte_fallback_json(prefix_space=False)):
        tokenizer = _tokenizer(source)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("▁", " " if source != byte_level_json() else "▁")
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


# Who wants a BOS: (post-processor adds it, add_bos_token) -> whether a prompt begins with one.
WANTS_BOS = {
    (False, None): False,
    (False, False): False,
    (False, True): True,
    (True, None): True,
    (True, False): False,
    (True, True): True,
}


@pytest.mark.parametrize(("processor", "flag"), WANTS_BOS)
@pytest.mark.parametrize("source", [byte_level_json, byte_fallback_json])
@pytest.mark.parametrize("suffix", [False, True])
def test_exactly_one_bos_where_it_is_wanted(source, processor: bool, flag: bool | None, suffix: bool):
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>"}
    if flag is not None:
        config["add_bos_token"] = flag
    text = _with_bos(source(), suffix=suffix) if processor else source()
    tokenizer = _tokenizer(text, tokenizer_config=config)
    wants = WANTS_BOS[processor, flag]
    plain = tokenizer.encode("Hello", add_bos=False)
    assert BOS not in plain
    assert EOS not in plain
    assert tokenizer.encode("Hello") == ([BOS] if wants else []) + plain
    assert tokenizer.encode("<s>Hello") == [BOS, *plain]
    assert tokenizer.encode("<s>Hello", add_bos=False) == [BOS, *plain]
    if wants:
        assert tokenizer.encode("<s><s>Hello") == [BOS, *plain]
    assert tokenizer.encode("") == ([BOS] if wants else [])
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.bos_id == BOS


def test_a_template_that_prints_bos_gives_one_bos():
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        tokenizer = _tokenizer(
            _with_bos(byte_level_json()), tokenizer_config={"bos_token": "<s>"}, chat_template=template
        )
        assert tokenizer.chat_template is not None
        ids = tokenizer.encode(tokenizer.chat_template.render([{"role": "user", "content": "Hi"}]))
        assert ids == [BOS, *tokenizer.encode("Hi", add_bos=False)]


def test_bos_is_known_from_the_post_processor_alone():
    tokenizer = _tokenizer(_with_bos(byte_level_json()))
    assert tokenizer.bos_id == BOS
    assert tokenizer.encode("Hi")[0] == BOS
    assert _tokenizer().bos_id is None


@pytest.mark.parametrize(
    ("eos", "expected"), [(7, {7}), ([7, 9], {7, 9}), ([], set()), (None, set()), (10**6, {10**6})]
)
def test_every_eos_of_generation_config_stops(eos: object, expected: set[int]):
    tokenizer = _tokenizer(generation_config={"eos_token_id": eos})
    assert tokenizer.stop_ids == expected | {EOT}  # <|eot_id|> is an end of turn by its name


def test_stop_ids_of_all_files_count():
    tokenizer = _tokenizer(
        tokenizer_config={"eos_token": "</s>", "eot_token": "<|eot_id|>", "pad_token": "<unk>"},
        generation_config={"eos_token_id": [9]},
    )
    assert tokenizer.stop_ids == {EOS, EOT, 9}
    assert _tokenizer(special_tokens_map={"eos_token": {"content": "</s>"}}).stop_ids == {EOS, EOT}


def test_only_special_tokens_stop_by_name():
    data = json.loads(byte_level_json())
    next_id = 1 + max(entry["id"] for entry in data["added_tokens"])
    names = {"<|eom_id|>": True, "<eos>": True, "<EOT>": True, "<|eot|>": False, "<|im_end|>": True, "<|end|>": True}
    for idx, (name, special) in enumerate(names.items()):
        data["added_tokens"].append(
            data["added_tokens"][0] | {"id": next_id + idx, "content": name, "special": special}
        )
    stops = _tokenizer(json.dumps(data)).stop_ids
    assert stops == {EOT, next_id, next_id + 1, next_id + 2}


@pytest.mark.parametrize("eos", ["</s>", True, -1, [3, None], {"id": 1}, 1.0])
def test_an_eos_that_is_no_id_is_an_error(eos: object):
    with pytest.raises(TextError, match="eos_token_id in generation_config"):
        _tokenizer(generation_config={"eos_token_id": eos})


def test_special_tokens_in_text_are_parsed_and_skipped():
    tokenizer = _tokenizer()
    hi = tokenizer.encode("Hi")
    ids = tokenizer.encode("<s>Hi</s>")
    assert ids == [BOS, *hi, EOS]
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>Hi</s>"
    think = tokenizer.encode("<think>")
    assert len(think) == 1
    assert tokenizer.decode(think) == "<think>"  # added, not special: it stays


def test_tokenizer_config_adds_special_tokens():
    size = _tokenizer().vocab_size
    entry = {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    think = _tokenizer().encode("<think>")[0]
    tokenizer = _tokenizer(
        tokenizer_config={"added_tokens_decoder": {str(size): entry, str(think): entry | {"content": "<think>"}}}
    )
    assert tokenizer.encode("<extra>") == [size]
    assert tokenizer.decode([size, think]) == ""
    assert tokenizer.vocab_size == size + 1
    with pytest.raises(TextError, match=f"'<think>' has id {size} in tokenizer_config.json and id {think}"):
        _tokenizer(tokenizer_config={"added_tokens_decoder": {str(size): entry | {"content": "<think>"}}})
    with pytest.raises(TextError, match=r"'<extra>' has id \d+ in tokenizer.json, which leaves a gap"):
        _tokenizer(tokenizer_config={"added_tokens_decoder": {str(size + 5): entry}})


def test_a_token_named_in_the_config_is_special():
    data = json.loads(byte_level_json())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] != "</s>"]
    assert _tokenizer(json.dumps(data)).encode("</s>") != [EOS]
    tokenizer = _tokenizer(json.dumps(data), tokenizer_config={"eos_token": "</s>"})
    assert tokenizer.encode("</s>") == [EOS]
    assert tokenizer.decode([EOS]) == ""
    with pytest.raises(TextError, match="the eos_token '<nowhere>' is not in"):
        _tokenizer(tokenizer_config={"eos_token": "<nowhere>"})


def test_limits_saved_with_a_tokenizer_do_not_cut_or_pad_prompts():
    data = json.loads(byte_level_json())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    assert _tokenizer(json.dumps(data)).encode(LINES[0]) == _tokenizer().encode(LINES[0])


def test_dropout_saved_with_a_tokenizer_is_off():
    data = json.loads(byte_level_json())
    data["model"]["dropout"] = 0.9
    tokenizer = _tokenizer(json.dumps(data))
    assert all(tokenizer.encode(line) == _tokenizer().encode(line) for line in LINES)


def test_ids_without_a_token_decode_to_nothing():
    tokenizer = _tokenizer()
    assert tokenizer.decode([]) == ""
    hi = tokenizer.encode("Hi")
    assert tokenizer.decode([*hi, tokenizer.vocab_size, 2**32 - 1]) == "Hi"  # a model's vocabulary may be padded
    for bad in (-1, 2**32):
        with pytest.raises(TextError, match=f"token id {bad} cannot be decoded"):
            tokenizer.decode([bad])
        with pytest.raises(TextError, match=f"token id {bad} cannot be decoded"):
            tokenizer.stream().push(bad)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, b"bytes", 3])
def test_what_is_no_text_is_an_error(text):
    with pytest.raises(TextError, match="the text to encode"):
        _tokenizer().encode(text)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, r"Missing \[UNK\] token"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}}, "`unk_id` is missing"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),  # the library panics
    ],
)
def test_what_the_tokenizer_cannot_encode_is_one_line(parts: dict[str, object], message: str):
    tokenizer = _tokenizer(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}} | parts))
    with pytest.raises(TextError, match=f"tokenizer: the tokenizer cannot encode the text: .*{message}") as info:
        tokenizer.encode("b c")
    _one_line(info)


def test_an_interrupt_is_no_error_of_the_library(monkeypatch: pytest.MonkeyPatch):
    tokenizer = _tokenizer()

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_backend", SimpleNamespace(encode=interrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("Hi")


def _one_line(info: pytest.ExceptionInfo[TextError]) -> str:
    message = str(info.value)
    assert "\n" not in message
    return message


def test_missing_and_slow_tokenizers(tmp_path):
    with pytest.raises(TextError, match=r"there is no tokenizer\.json") as info:
        Tokenizer.from_dir(tmp_path)
    assert str(tmp_path) in _one_line(info)
    for slow in ("vocab.json", "tokenizer.model"):
        (tmp_path / slow).write_bytes(b"\n\x0e\n\x05<unk>")
        with pytest.raises(TextError, match=f"only there as {slow}; expected tokenizer.json") as info:
            Tokenizer.from_dir(tmp_path)
        _one_line(info)
    with pytest.raises(TextError, match=r"there is no tokenizer\.json"):
        Tokenizer({})


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"model": {"type": "Nonsense"}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [{"content": "x"}]}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [{"id": 0, "content": {}}]}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "post_processor": {"type": "TemplateProcessing", '
        '"single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": [], "special_tokens": {}}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": 5, "continuing_subword_prefix": "##"}}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": {"type": "Precompiled", '
        '"precompiled_charsmap": "AAAA"}}',  # the library panics
        byte_level_json()[:-100],
        "[" * 100_000,
    ],
    ids=range(14),
)
def test_a_damaged_tokenizer_json_is_one_line(tmp_path, damaged: str):
    (tmp_path / "tokenizer.json").write_text(damaged, encoding="utf-8")
    with pytest.raises(TextError, match=r"tokenizer\.json") as info:
        Tokenizer.from_dir(tmp_path)
    assert str(tmp_path) in _one_line(info)


@pytest.mark.parametrize("merge", [["a", "b"], "a b", ["a", 5], []])
def test_merges_without_their_prefix_are_refused(tmp_path, merge: object):
    """The library would end the process."""
    model: dict[str, object] = {"type": "BPE", "vocab": {"a": 0, "##b": 1, "b": 2, "ab": 3}}
    model["continuing_subword_prefix"] = "##"
    for merges in ([["a", "##b"]], ["a ##b"]):
        _write_tokenizer(tmp_path, model | {"merges": merges})
        Tokenizer.from_dir(tmp_path)
        _write_tokenizer(tmp_path, model | {"merges": [*merges, merge]})
        with pytest.raises(TextError, match="begins with the continuing_subword_prefix '##'"):
            Tokenizer.from_dir(tmp_path)


def _write_tokenizer(path: Path, model: dict[str, object]) -> None:
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}), encoding="utf-8")


def test_files_beside_it_are_checked_too(tmp_path):
    _write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{nope", encoding="utf-8")
    with pytest.raises(TextError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.from_dir(tmp_path)
    for token_id in ("x", "9" * 5000):
        _write(tmp_path, tokenizer_config={"added_tokens_decoder": {token_id: {"content": "<s>"}}})
        with pytest.raises(TextError, match=r"tokenizer_config\.json declares added token"):
            Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(TextError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_dir(tmp_path)


def test_a_broken_chat_template_only_matters_to_chats():
    tokenizer = _tokenizer(tokenizer_config={"chat_template": "{% if %}"})
    assert tokenizer.encode("Hi")
    with pytest.raises(TextError, match="chat template, line 1"):
        _ = tokenizer.chat_template
    assert _tokenizer().chat_template is None
