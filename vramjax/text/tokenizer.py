"""Text to ids and back, from the tokenizer files of a checkpoint (tokenizer.json; library `tokenizers`).

Knows the files' conventions: who adds the beginning-of-sequence token, which ids stop, where the chat template is.
Knows nothing of models or devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend

from vramjax.errors import TextError
from vramjax.text.chat import ChatTemplate
from vramjax.text.stream import StreamDecoder, check_token_id

# All that a checkpoint may say about text; conversion carries them along.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)

# Special tokens that end a turn by their very name: <eos>, <|eos|>, <|eot_id|>, <|eom_id|>, ... Nothing else is
# taken for a stop token because of how it looks; files name their own under eos_token, eot_token and eom_token.
_STOP_NAME = re.compile(r"<\|?(eos|eot|eom)(_id)?\|?>", re.IGNORECASE)
_STOP_ROLES = ("eos_token", "eot_token", "eom_token")


class Tokenizer:
    """A checkpoint's tokenizer: `encode` makes a prompt that begins with exactly one BOS where the model wants one.

    Whether it wants one is what tokenizer_config.json says (`add_bos_token`), else what the post-processor of
    tokenizer.json does. Special tokens written out in a text ("<|im_end|>") become their ids, as they must for chat
    templates to work; so text of strangers can contain them too.

    Example: with BOS 1 for "<s>" and "Hi" = [6324], `encode("Hi")`, `encode("<s>Hi")` and `encode("<s><s>Hi")` are all
    [1, 6324]; `encode("Hi", add_bos=False)` is [6324].
    """

    def __init__(self, files: Mapping[str, str], *, name: str = "tokenizer") -> None:
        """Builds a tokenizer from the texts of the files in TEXT_FILES; only tokenizer.json is needed.

        Raises:
          TextError: a file is not what it should be; the message begins with `name`.
        """
        self._name = name
        if "tokenizer.json" not in files:
            raise TextError(f"{name}: there is no tokenizer.json; expected one beside the weights")
        data = _read_object(files, "tokenizer.json", name)
        self._config = _read_object(files, "tokenizer_config.json", name)
        roles = _special_roles(_read_object(files, "special_tokens_map.json", name)) | _special_roles(self._config)
        generation = _read_object(files, "generation_config.json", name)

        self._backend = _load_backend(data, self._config, roles, name)
        self._roles = roles
        self._template_file = files.get("chat_template.jinja")
        vocab = self._backend.get_vocab()  # made anew by each call
        self.vocab_size: int = 1 + max(vocab.values(), default=-1)
        """One more than the largest id. A model's vocabulary may be larger: it is often padded."""
        self.longest_token: int = max(map(len, vocab), default=1)
        """Characters of the longest token, of which each stands for one of a text, or for a part of one."""
        self._prefix = self._find_prefix(data.get("post_processor"))
        self.stop_ids: frozenset[int] = self._find_stop_ids(generation)
        """Ids after which decoding stops: eos of every file (a number or a list), and end-of-turn tokens."""

    @classmethod
    def from_dir(cls, path: str | Path, *, name: str | None = None) -> Tokenizer:
        """Reads the tokenizer files of a checkpoint or packed directory, which errors call `name`.

        Raises:
          TextError: tokenizer.json is missing or damaged, or a file beside it contradicts it.
        """
        path = Path(path)
        if not (path / "tokenizer.json").is_file():
            if unread := unread_tokenizer(path):
                raise TextError(f"{path}: {unread}")
            raise TextError(f"{path}: there is no tokenizer.json; expected one beside the weights")
        files: dict[str, str] = {}
        for file in TEXT_FILES:
            if not (path / file).is_file():
                continue
            try:
                files[file] = (path / file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TextError(f"{path / file} cannot be read: {error}") from error
        return cls(files, name=name or str(path))

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id, whether or not `encode` adds it; None if the tokenizer has none."""
        if "bos_token" in self._roles:
            return self._backend.token_to_id(self._roles["bos_token"])
        return self._prefix[0] if self._prefix else None

    @property
    def vocabulary(self) -> dict[int, str]:
        """The tokens by their ids, added ones too; as the tokenizer writes them, not as text."""
        return {token_id: token for token, token_id in self._backend.get_vocab().items()}

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template: chat_template.jinja, else the one in tokenizer_config.json, else None.

        Raises:
          TextError: there is one, and it cannot be parsed.
        """
        source = self._template_file
        if source is None:
            source = self._config.get("chat_template")
        if source is None:
            return None
        try:
            return ChatTemplate(source, **self._roles)  # pyright: ignore[reportArgumentType]  (checked there)
        except TextError as error:
            raise TextError(f"{self._name}: {error}") from error

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """The ids of `text`, after exactly one BOS if the model wants one and `add_bos` is set.

        A BOS that `text` begins with, because a chat template or the user wrote it, counts as that one. With
        `add_bos=False` the ids are those of `text` as it is. No text and no BOS give no ids.

        Raises:
          TextError: `text` is not a text that UTF-8 can express, or not one that the tokenizer has tokens for.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            what = "has lone surrogates" if isinstance(text, str) else f"is a {type(text).__name__}"
            raise TextError(f"the text to encode {what}; expected a str that UTF-8 can express") from error
        except BaseException as error:
            raise TextError(f"{self._name}: the tokenizer cannot encode the text: {library_reason(error)}") from error
        if not add_bos or not self._prefix:
            return ids
        width = len(self._prefix)
        while ids[:width] == self._prefix:
            ids = ids[width:]
        return self._prefix + ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing.

        What the model wrote is not touched: `clean_up_tokenization_spaces` of tokenizer_config.json is not applied.

        Raises:
          TextError: an id is negative or does not fit in 32 bits.
        """
        return self._backend.decode([check_token_id(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(self._backend, skip_special_tokens=skip_special_tokens)

    def _find_prefix(self, post_processor: object) -> list[int]:
        """The ids that a prompt begins with: nearly always [BOS] or nothing."""
        try:
            prefix = _template_prefix(post_processor)
        except TextError as error:
            raise TextError(f"{self._name}: {error}") from error
        bos = self._backend.token_to_id(self._roles["bos_token"]) if "bos_token" in self._roles else None
        wanted = self._config.get("add_bos_token")
        if wanted is False:
            return [i for i in prefix if i != bos]
        if wanted is True and bos is not None and bos not in prefix:
            return [bos, *prefix]
        return prefix

    def _find_stop_ids(self, generation: Mapping[str, object]) -> frozenset[int]:
        eos = generation.get("eos_token_id")
        stop_ids: set[int] = set()
        for i in eos if isinstance(eos, list) else [] if eos is None else [eos]:
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise TextError(
                    f"{self._name}: eos_token_id in generation_config.json is {eos!r}; expected an id or a list"
                )
            stop_ids.add(i)
        named = [self._roles[role] for role in _STOP_ROLES if role in self._roles]
        added = self._backend.get_added_tokens_decoder().values()
        named += [token.content for token in added if token.special and _STOP_NAME.fullmatch(token.content)]
        vocab_ids = [self._backend.token_to_id(token) for token in named]
        return frozenset(stop_ids.union(i for i in vocab_ids if i is not None))


def unread_tokenizer(path: Path) -> str | None:
    """What is to be said of a checkpoint's tokenizer that is only there in a form that is not read; else None."""
    slow = next((file for file in ("tokenizer.model", "vocab.json") if (path / file).is_file()), None)
    if slow is None or (path / "tokenizer.json").is_file():
        return None
    return (
        f"the tokenizer is only there as {slow}; expected tokenizer.json, which transformers' "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes"
    )


def library_reason(error: BaseException) -> str:
    """What the library says in an error of its own, in one line. An error that is not the library's is raised again.

    It raises plain Exception, and, where its authors expected no error, a panic of Rust's, which is not even that.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split())


def _read_object(files: Mapping[str, str], file: str, name: str) -> dict[str, object]:
    if file not in files:
        return {}
    try:
        data = json.loads(files[file])
    except (ValueError, RecursionError) as error:
        raise TextError(f"{name}: {file} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise TextError(f"{name}: {file} holds a {type(data).__name__}; expected a JSON object")
    return data


def _special_roles(data: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, pad_token, ...: each a text, or an object with its text under "content"."""
    roles = {}
    for role, value in data.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if role.endswith("_token") and isinstance(text, str) and text:
            roles[role] = text
    return roles


def _template_prefix(post_processor: object) -> list[int]:
    """The ids that a post-processor puts before a text.

    What it puts after one (an EOS) has no place in a prompt that is to be continued.

    Raises:
      TextError: one of them is not there.
    """
    match post_processor:
        case {"type": "Sequence", "processors": [*processors]}:
            return [i for inner in reversed(processors) for i in _template_prefix(inner)]
        case {"type": "TemplateProcessing", "single": [*pieces], "special_tokens": dict(special)}:
            prefix: list[int] = []
            for piece in pieces:
                match piece:
                    case {"SpecialToken": {"id": str(token)}}:
                        if token not in special:
                            raise TextError(
                                f"the post-processor of tokenizer.json puts {token!r} before a text; expected its ids "
                                "under special_tokens"
                            )
                        prefix += special[token]["ids"]
                    case _:
                        break
            return prefix
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(idx)]}:
            return [idx]
    return []


def _load_backend(
    data: dict[str, object], config: Mapping[str, object], roles: Mapping[str, str], name: str
) -> Backend:
    """The `tokenizers` object, with what tokenizer_config.json adds to tokenizer.json."""
    # A tokenizer saved after training may still cut or pad texts to that training's length, or merge at random.
    data = data | {"truncation": None, "padding": None}
    model = data.get("model")
    if isinstance(model, dict) and "dropout" in model:
        data["model"] = model | {"dropout": None}
    by_content: dict[str, dict[str, object]] = {}
    for entry in _dicts(data.get("added_tokens")):
        if not isinstance(content := entry.get("content"), str):
            raise TextError(f"{name}: tokenizer.json has an added token without a content; expected a text")
        by_content[content] = dict(entry)
    declared = config.get("added_tokens_decoder")
    for idx, entry in declared.items() if isinstance(declared, Mapping) else ():
        is_id = re.fullmatch(r"\d{1,10}", str(idx)) is not None
        if not is_id or not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise TextError(f"{name}: tokenizer_config.json declares added token {idx!r} without an id or a content")
        known = by_content.setdefault(entry["content"], {**entry, "id": int(idx)})
        if known.get("id") != int(idx):
            raise TextError(
                f"{name}: token {entry['content']!r} has id {idx} in tokenizer_config.json and id {known.get('id')} "
                "in tokenizer.json; expected the same one"
            )
        known["special"] = bool(entry.get("special", known.get("special")))
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    for role, content in roles.items():
        if content in by_content:
            by_content[content]["special"] = True
        elif isinstance(vocab, Mapping) and content in vocab:
            by_content[content] = {"id": vocab[content], "content": content, "special": True}
        elif role == "bos_token" or role in _STOP_ROLES:
            raise TextError(f"{name}: the {role} {content!r} is not in tokenizer.json; expected a token of it")
    _check_merges(model, name)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    fields = ("id", "content", *flags)
    entries = [{k: v for k, v in (flags | entry).items() if k in fields} for entry in by_content.values()]
    try:
        data["added_tokens"] = sorted(entries, key=lambda entry: entry["id"])  # pyright: ignore
        backend = Backend.from_str(json.dumps(data))
    except BaseException as error:
        raise TextError(f"{name}: tokenizer.json cannot be used: {library_reason(error)}") from error
    for entry in entries:
        # The library numbers added tokens itself, and only logs when that is not what the file says.
        if backend.token_to_id(str(entry["content"])) != entry["id"]:
            raise TextError(
                f"{name}: added token {entry['content']!r} has id {entry['id']} in tokenizer.json, which leaves a "
                "gap or is taken; expected ids that follow the vocabulary"
            )
    return backend


def _check_merges(model: object, name: str) -> None:
    """The library cuts a prefix off the second part of each merge, and ends the process where there is none."""
    if not isinstance(model, Mapping):
        return
    prefix = model.get("continuing_subword_prefix")
    if not isinstance(prefix, str) or not prefix:  # "" is common, and cuts nothing off
        return
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else ():
        second = (
            merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] if isinstance(merge, list) and merge else ""
        )
        if not isinstance(second, str) or not second.startswith(prefix):
            raise TextError(
                f"{name}: tokenizer.json has the merge {merge!r}; expected a second part that begins with the "
                f"continuing_subword_prefix {prefix!r}"
            )


def _dicts(value: object) -> list[dict[str, object]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
