"""Small tokenizers of each kind that checkpoints come with, built in milliseconds."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "Once upon a time there was a little town by the sea, and in it lived 12 cats and 340 dogs.",
    "It's what they'll say: we've seen it, I'm sure, don't you think? -- yes! (no)",
    "def main(argv):\n    for i in range(10):\n        print(argv[i])\n\treturn 0\n",
    "日本語のテキストと中文文本。 Привет, мир! Ελληνικά, عربى",
    "smile 🙂 family 👨‍👩‍👧‍👦 flag 🇫🇷 wave 👋🏽",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # Plain added tokens are not in the byte alphabet, or mean other bytes in it.
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), "日 本", "é"])
    return tokenizer.to_str()


@cache
def byte_fallback_json(*, prefix_space: bool = True) -> str:
    """As Llama's: metaspace by normalizer, bytes for characters that the vocabulary lacks."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    steps = [normalizers.Replace(" ", "▁")]
    trained.normalizer = normalizers.Sequence(([normalizers.Prepend("▁")] if prefix_space else []) + steps)
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL + BYTE_TOKENS, show_progress=False)
    trained.train_from_iterator([*LINES[:3], "日本の日本語"], trainer)  # all other characters are bytes
    data = json.loads(trained.to_str())
    data["model"] |= {"byte_fallback": True, "fuse_unk": True}
    data["added_tokens"] = data["added_tokens"][: len(SPECIAL)]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(chain + ([decoders.Strip(" ", 1, 0)] if prefix_space else []))
    return tokenizer.to_str()


def backends() -> dict[str, Tokenizer]:
    """Tokenizers by the kind of their decoder, common ones first."""
    found = {
        "byte-level": Tokenizer.from_str(byte_level_json()),
        "byte-fallback": Tokenizer.from_str(byte_fallback_json()),
        "byte-fallback without prefix": Tokenizer.from_str(byte_fallback_json(prefix_space=False)),
    }
    pieces = ["▁", "▁▁", "▁a", "b", "##c", "##", ".", "n't", "'s", "do", "not", "d</w>", "</w>", " ", "  ", " x "]
    pieces += ["<|", "|", ">", "|>", "�", "日", "👨", "\u200d", "é", "a"]
    vocab = {piece: idx for idx, piece in enumerate([*SPECIAL, *BYTE_TOKENS, *pieces])}
    fuse = decoders.Fuse()
    others = {
        "none": None,
        "metaspace": decoders.Metaspace(),
        "metaspace, first": decoders.Metaspace(prepend_scheme="first"),
        "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
        "wordpiece": decoders.WordPiece(),
        "wordpiece, no clean-up": decoders.WordPiece(cleanup=False),
        "end of word": decoders.BPEDecoder(),
        "ctc": decoders.CTC(),
        "bytes and metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        "strip each": decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Replace("a", "é")]),
        "strip all": decoders.Sequence([decoders.Replace("▁", " "), fuse, decoders.Strip(" ", 3, 0)]),
        "replace in all": decoders.Sequence([fuse, decoders.Replace("<|>", "!"), decoders.Replace("▁▁a", "")]),
        "overlap": decoders.Sequence([decoders.ByteFallback(), fuse, decoders.Replace("▁▁", "▁")]),
        "pattern in all": decoders.Sequence([fuse, decoders.Replace(Regex("▁+b"), "-"), decoders.Strip("▁", 1, 0)]),
        "nested": decoders.Sequence([decoders.Sequence([decoders.ByteFallback(), fuse]), decoders.Strip("a", 2, 0)]),
    }
    for kind, decoder in others.items():
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.add_special_tokens(SPECIAL)
        if decoder is not None:
            tokenizer.decoder = decoder
        found[kind] = tokenizer
    return found
