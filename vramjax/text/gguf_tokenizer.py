"""The tokenizer inside a GGUF file, rebuilt as the files that a Hugging Face checkpoint has.

A GGUF file holds tokens, merges or scores, and the *name* of the rule that splits text into words, not the rule. The
rules known here are written out below; a name that is not among them is refused, since a wrong rule still gives fluent
text, only from wrong ids. Reads `tokenizer.*` metadata; knows nothing of the file format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as Backend

from vramjax.errors import TextError
from vramjax.text.tokenizer import library_reason

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)  # tokenizer.ggml.token_type; 5 is unused, 6 a byte

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, object]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


_GPT2 = [_byte_level(use_regex=True)]
_SMOLLM = [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]
_LLAMA3 = _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}")
_QWEN2 = _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}")

# Names of tokenizer.ggml.pre -> pre-tokenizers. "default" is none of them: a converter that did not know the model's
# rule wrote it, and what llama.cpp then does is a rule of its own.
_PRE_TOKENIZERS: dict[str, list[dict[str, object]]] = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def build_tokenizer(metadata: Mapping[str, object]) -> dict[str, str]:
    """The texts of tokenizer.json, tokenizer_config.json and generation_config.json, by file name.

    Args:
      metadata: a GGUF file's metadata by key, as plain Python values; only keys that begin with "tokenizer." are read.

    Raises:
      TextError: the tokenizer's model or its pre-tokenizer is not known, or the metadata is incomplete or contradicts
        itself.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise TextError(
            f"the GGUF tokenizer model is {model!r}; expected gpt2 (byte-level BPE) or llama (SentencePiece-style BPE)"
        )
    tokens = _tokens(metadata)
    types = _numbers(metadata, "token_type", len(tokens)) or [_NORMAL] * len(tokens)
    roles = _roles(metadata, tokens, default_ids=model == "llama")
    pre = metadata.get("tokenizer.ggml.pre")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # what such checkpoints did before the key was there
        add_bos = model == "llama" or _PRE_TOKENIZERS.get(str(pre)) is _LLAMA3
    add_bos = bool(add_bos) and "bos_token" in roles

    if model == "gpt2":
        parts = _byte_level_parts(metadata, tokens, pre)
    else:
        parts = _sentencepiece_parts(metadata, tokens, types, roles)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types, roles),
        "post_processor": _bos_processor(tokens, roles["bos_token"]) if add_bos else None,
        **parts,
    }
    text = json.dumps(tokenizer, ensure_ascii=False)
    try:
        Backend.from_str(text)
    except BaseException as error:
        raise TextError(f"the GGUF tokenizer cannot be rebuilt: {library_reason(error)}") from error

    named = {role: tokens[idx] for role, idx in roles.items()}
    config = {**named, "add_bos_token": add_bos, "clean_up_tokenization_spaces": False}
    template = _chat_template(metadata)
    if template is not None:
        config["chat_template"] = template
    stops = {roles[role] for role in ("eos_token", "eot_token", "eom_token") if role in roles}
    generation = {"bos_token_id": roles.get("bos_token"), "eos_token_id": sorted(stops)}
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
        "generation_config.json": json.dumps(
            {key: value for key, value in generation.items() if value not in (None, [])}, indent=2
        ),
    }


def _byte_level_parts(metadata: Mapping[str, object], tokens: list[str], pre: object) -> dict[str, object]:
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise TextError(
            f"the GGUF pre-tokenizer is {pre!r} (tokenizer.ggml.pre); expected one of {', '.join(_PRE_TOKENIZERS)}: "
            "use the model's safetensors, which come with a tokenizer.json"
        )
    merges = _merges(metadata)
    if merges is None:
        raise TextError("the GGUF tokenizer has no tokenizer.ggml.merges; a byte-level BPE needs them")
    splitter = _PRE_TOKENIZERS[pre]
    steps = [*splitter]
    if metadata.get("tokenizer.ggml.add_space_prefix") is True:
        steps[-1] = {**steps[-1], "add_prefix_space": True}
    # No unknown token: a byte that the vocabulary lacks (SmolLM2 has 235 of the 256) is left out, as by its authors.
    # Llama 3 takes a word that is a token as that token, even where its merges would not arrive there.
    bpe = _bpe(tokens, merges, ignore_merges=splitter is _LLAMA3)
    return {
        "normalizer": {"type": "NFC"} if splitter is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": bpe,
    }


def _sentencepiece_parts(
    metadata: Mapping[str, object], tokens: list[str], types: Sequence[float], roles: Mapping[str, int]
) -> dict[str, object]:
    merges = _merges(metadata)
    if merges is None:
        scores = _numbers(metadata, "scores", len(tokens))
        if scores is None:
            raise TextError("the GGUF tokenizer has neither tokenizer.ggml.scores nor merges; expected one of them")
        merges = _merges_from_scores(tokens, types, scores)
    normalizers: list[dict[str, object]] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = roles.get("unk_token")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, merges, unk_token=None if unknown is None else tokens[unknown], byte_fallback=True),
    }


def _merges_from_scores(tokens: list[str], types: Sequence[float], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges in the order in which SentencePiece would do them: the pair that makes the best-scored token first.

    Every way to put a token together from two others is a merge. Example: with scores ab -1, abc -2 and bc -3 the
    merges are (a, b), then (ab, c) and (a, bc), then (b, c).
    """
    ids = {token: idx for idx, token in enumerate(tokens) if types[idx] == _NORMAL}
    merges: list[tuple[str, str]] = []
    for token, _ in sorted(ids.items(), key=lambda item: (-scores[item[1]], item[1])):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _bpe(
    tokens: list[str],
    merges: Sequence[tuple[str, str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {token: idx for idx, token in enumerate(tokens)},
        "merges": merges,
    }


def _added_tokens(tokens: list[str], types: Sequence[float], roles: Mapping[str, int]) -> list[dict[str, object]]:
    special = {idx for idx, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)} | set(roles.values())
    plain = {idx for idx, kind in enumerate(types) if kind == _USER_DEFINED}
    return [
        {
            "id": idx,
            "content": tokens[idx],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": idx in special,
        }
        for idx in sorted(special | plain)
    ]


def _bos_processor(tokens: list[str], bos: int) -> dict[str, object]:
    first = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    second = {"SpecialToken": {"id": tokens[bos], "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            second,
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _roles(metadata: Mapping[str, object], tokens: list[str], *, default_ids: bool) -> dict[str, int]:
    """bos_token, eos_token, ... -> id."""
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if default_ids else {}  # SentencePiece's own
    roles: dict[str, int] = {}
    for key, role in (
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("eot", "eot_token"),
        ("eom", "eom_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
    ):
        idx = metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key))
        if idx is None:
            continue
        if not isinstance(idx, int) or not 0 <= idx < len(tokens):
            raise TextError(f"tokenizer.ggml.{key}_token_id is {idx!r}; expected 0 to {len(tokens) - 1}")
        roles[role] = idx
    return roles


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise TextError("the GGUF metadata has no list of texts tokenizer.ggml.tokens; expected the vocabulary")
    ids: dict[str, int] = {}
    for idx, token in enumerate(tokens):
        if ids.setdefault(token, idx) != idx:
            raise TextError(
                f"the GGUF tokenizer has token {token!r} as ids {ids[token]} and {idx}; expected each only once"
            )
    return list(tokens)


def _numbers(metadata: Mapping[str, object], key: str, count: int) -> list[float] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if not isinstance(values, Sequence) or len(values) != count:
        got = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise TextError(f"tokenizer.ggml.{key} has {got} entries; expected one for each of the {count} tokens")
    if not all(isinstance(value, int | float) for value in values):
        raise TextError(f"tokenizer.ggml.{key} holds a {type(values[0]).__name__}; expected numbers")
    return list(values)


def _merges(metadata: Mapping[str, object]) -> list[tuple[str, str]] | None:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, Sequence) or not merges:
        return None
    pairs: list[tuple[str, str]] = []
    for idx, merge in enumerate(merges):
        match merge.split(" ") if isinstance(merge, str) else None:
            case [left, right] if left and right:
                pairs.append((left, right))
            case _:
                raise TextError(f"tokenizer.ggml.merges[{idx}] is {merge!r}; expected two tokens with a space between")
    return pairs


def _chat_template(metadata: Mapping[str, object]) -> str | list[dict[str, str]] | None:
    """The default template alone, or it and the named ones as tokenizer_config.json lists them."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    if isinstance(default, str):
        named = {"default": default, **named}
    entries = [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]
    if [entry["name"] for entry in entries] == ["default"]:
        return entries[0]["template"]
    return entries or None
