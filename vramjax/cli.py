"""The command line: `vramjax` decodes, `plan` says what that takes, `convert` packs a checkpoint. No arithmetic."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from absl import flags

from vramjax import interrupt
from vramjax._version import __version__
from vramjax.config import shown
from vramjax.device_pool import reserve_pool
from vramjax.errors import BudgetError, ConfigError, VramjaxError
from vramjax.flags import check_decode_flags, convert_flags, decode_flags, memory_request, parse_flags
from vramjax.progress import print_notes, progress_bar
from vramjax.prompts import AnswerFile, read_prompts
from vramjax.report import plan_tables, summary

if TYPE_CHECKING:
    import jax

    from vramjax.checkpoint.packed import Packed
    from vramjax.decode.sampler import Sampling
    from vramjax.language_model import LanguageModel

USAGE = """\
Decodes a language model within a budget of device memory; layers that do not fit are streamed through it.

  vramjax --model=demo --prompt='Why is the sky blue?'          as much on the device as is free
  vramjax --model=Qwen/Qwen3-8B --device_budget=6GiB --prompt='...'
  vramjax --model=MODEL --prompts_file=F.txt --out=F.jsonl      many prompts; a rerun goes on where it stopped
  vramjax plan --model=MODEL --device_budget=6GiB               what that would take, without loading it
  vramjax convert SRC DST                                       pack a checkpoint as Q8 for streaming
"""


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; exits with 0, or with 1 and an error in one line.

    The installed command is `vramjax.__main__.run`, which also ends this on an interrupt.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    # What users see are our own one-line warnings, not the line of source that Python would add.
    warnings.showwarning = lambda message, *args, **kwargs: print(f"warning: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character of the answer shows "?"
            stream.reconfigure(errors="replace")
    try:
        if args[:1] == ["convert"]:
            _convert(_parse(convert_flags(), args[1:], usage="vramjax convert SRC DST [--group=128]"))
        elif args[:1] == ["plan"]:
            _decode(_parse(decode_flags(), ["--plan", *args[1:]], usage=USAGE))
        else:
            _decode(_parse(decode_flags(), args[args[:1] == ["decode"] :], usage=USAGE))
    except VramjaxError as error:
        sys.exit(_fail(str(error)))
    except BrokenPipeError:  # the reader of our output has gone: nothing is wrong here
        _discard_stdout()
        sys.exit(1)
    except OSError as error:  # a file that can neither be read nor written, wherever that was noticed
        what = f"{error.filename} cannot be read or written: {error.strerror}" if error.filename else str(error)
        sys.exit(_fail(f"{what}; check the path, its permissions and the disk"))
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sys.exit(
            _fail(
                "the device has no memory left; expected more to be free: take a smaller --device_budget or --context"
            )
        )


def _print(text: str = "", *, end: str = "\n") -> None:
    """To stdout, at once: what is printed is waited for.

    Raises:
      ConfigError: it cannot be written.
      BrokenPipeError: nobody reads it any more.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise ConfigError(
            f"stdout cannot be written: {error.strerror}; expected room for all that is printed: send it elsewhere"
        ) from error


def _discard_stdout() -> None:
    """What is left of it would be tried again, and said to fail, when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    interrupt.check()  # then the error is only what became of that
    lines = (line.strip() for line in message.splitlines())
    print(f"error: {' '.join(line for line in lines if line)}", file=sys.stderr)
    return 1


def _parse(values: flags.FlagValues, args: list[str], *, usage: str) -> SimpleNamespace:
    """Flags as attributes, and `positional`."""
    positional = parse_flags(values, args)
    if values["help"].value:
        _print(f"{usage}\n{values.get_help()}")
        sys.exit(0)
    if values["version"].value:
        _print(__version__)
        sys.exit(0)
    return SimpleNamespace(**values.flag_values_dict(), positional=positional)


def _convert(args: SimpleNamespace) -> None:
    from vramjax.checkpoint.convert import convert
    from vramjax.checkpoint.resolve import default_cache_dir, locate, open_source

    if len(args.positional) != 2:
        raise ConfigError(
            f"convert got {len(args.positional)} arguments; expected two: vramjax convert SRC DST, a checkpoint and a "
            "new directory"
        )
    if not args.positional[1]:  # to a path this is the current directory
        raise ConfigError("DST is empty; expected a new directory: vramjax convert SRC DST")
    source = open_source(locate(args.positional[0], cache_dir=default_cache_dir(), progress=args.progress))
    print_notes(source.notes, enabled=args.progress)
    dst = Path(os.path.expanduser(args.positional[1]))
    _print(str(convert(source, dst, group=int(args.group), progress=args.progress)))


def _decode(args: SimpleNamespace) -> None:
    check_decode_flags(args)
    if args.release == "free":
        # Only this allocator gives memory back to the driver. It is chosen when JAX starts, so before the import.
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    reserve_pool(memory_request(args), _device_indices(args) or [0])
    if args.plan:
        _print_plan(args)
        return
    if args.stats_json is not None:
        _check_writable(Path(args.stats_json))

    from vramjax.decode.sampler import Sampling

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    if args.prompts_file is not None:
        _answer_file(args, sampling)
    else:
        _answer_one(args, sampling)


def _answer_one(args: SimpleNamespace, sampling: Sampling) -> None:
    """Decodes one prompt, printing tokens as they come."""
    where, prompt = "--prompt", args.prompt
    if args.prompt_ids is not None:
        where, prompt = "--prompt_ids", _whole_numbers("prompt_ids", args.prompt_ids, example="1,2,3")
    with _load(args, _open(args), {where: prompt}) as model:
        tokens = model.generate(
            prompt,
            max_new_tokens=args.max_new_tokens,
            sampling=sampling,
            chat=args.chat,
            ignore_stop=args.ignore_stop,
        )
        for token in tokens:
            _print(token.text, end="")
            interrupt.check()
        _print()
        _report(args, model)


def _answer_file(args: SimpleNamespace, sampling: Sampling) -> None:
    """Decodes every prompt of a file that has no answer yet."""
    prompts = read_prompts(Path(args.prompts_file))
    packed = _open(args)
    # The model itself: another may have taken its path, and it may have moved.
    settings = {"model": packed.digest}
    settings |= {name: getattr(args, name) for name in ("chat", "max_new_tokens", "context", "ignore_stop")}
    with AnswerFile(Path(args.out), prompts, settings | dataclasses.asdict(sampling)) as answers:
        waiting = [prompt for prompt in prompts if prompt.index not in answers.done]
        if answers.done:
            print(f"{len(answers.done)} of {len(prompts)} prompts are already answered in {args.out}", file=sys.stderr)
        if not waiting:
            _sort(answers)  # the run that gave the last one may have ended before it could
            if args.stats_json is not None:
                print(f"nothing was decoded, so {args.stats_json} is not written", file=sys.stderr)
            return
        with _load(args, packed, {prompt.where: prompt.content for prompt in waiting}) as model:
            generations = model.generate_many(
                [prompt.content for prompt in waiting],
                max_new_tokens=args.max_new_tokens,
                sampling=sampling,
                chat=args.chat,
                ignore_stop=args.ignore_stop,
                on_token=lambda *token: interrupt.check(),
            )
            with progress_bar("Answering", total=len(waiting), unit="items", enabled=args.progress) as advance:
                for generation in generations:
                    answers.append(waiting[generation.index], generation)
                    interrupt.check()
                    advance(1)
            _sort(answers)
            _report(args, model)


def _sort(answers: AnswerFile) -> None:
    with contextlib.suppress(OSError):  # no room for a second file: the answers are all there
        answers.sort()


def _open(args: SimpleNamespace) -> Packed:
    """The model's files, packed if they were not; no weights are read."""
    from vramjax.checkpoint.resolve import open_model

    _devices(args)  # first: packing is long
    return open_model(args.model, cache_dir=_cache_dir(args), progress=args.progress)


def _load(args: SimpleNamespace, packed: Packed, prompts: Mapping[str, Any]) -> LanguageModel:
    """The model, with a context that the longest prompt and its answer fit into, if none was asked for.

    Every prompt is checked before weights are loaded; `prompts` has them by where they come from, for errors.
    """
    from vramjax.decode.decoding import check_prompt
    from vramjax.language_model import LanguageModel
    from vramjax.loading import open_draft_model, open_tokenizer
    from vramjax.text.prompt import encode_prompt

    tokenizer = open_tokenizer(packed.path)
    longest, limit = 0, args.context or packed.config.max_positions
    for where, prompt in prompts.items():
        try:
            ids = encode_prompt(tokenizer, prompt, chat=args.chat, context=limit)
            check_prompt(ids, packed.config, limit)
        except VramjaxError as error:
            raise type(error)(f"{where}: {error}") from error
        longest = max(longest, len(ids))
    draft = None
    if args.draft_model is not None:
        draft = open_draft_model(
            args.draft_model, packed, tokenizer, cache_dir=_cache_dir(args), progress=args.progress
        )
    return LanguageModel(
        packed,
        tokenizer,
        draft=draft,
        **dataclasses.asdict(memory_request(args, len(prompts))),
        release=args.release,
        context=args.context or min(longest + args.max_new_tokens, limit),
        devices=_devices(args),
        progress=args.progress,
    )


def _report(args: SimpleNamespace, model: LanguageModel) -> None:
    stats = model.stats()
    if args.stats_json is not None:
        try:
            Path(args.stats_json).write_text(json.dumps(stats, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise _not_writable(args.stats_json, error) from error
    print(f"\n{summary(stats)}", file=sys.stderr)


def _check_writable(path: Path) -> None:
    """Notices before a model is loaded that its statistics would have nowhere to go."""
    existed = os.path.lexists(path)
    try:
        if path.is_fifo():  # whoever reads it would take what closes here for the end
            return
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"--stats_json {path} cannot be written: {error.strerror}; choose another path")


def _print_plan(args: SimpleNamespace) -> None:
    from vramjax.checkpoint.resolve import read_geometry, read_tokenizer
    from vramjax.draft_model import DraftModelShape, check_same_tokens, errors_name_draft_model
    from vramjax.planning import plan_run

    config, groups = read_geometry(args.model, cache_dir=_cache_dir(args), progress=args.progress)
    draft = None
    if args.draft_model is not None:
        with errors_name_draft_model():
            draft_config, draft_groups = read_geometry(
                args.draft_model, cache_dir=_cache_dir(args), progress=args.progress
            )
            draft_tokenizer = read_tokenizer(args.draft_model, cache_dir=_cache_dir(args))
        tokenizer = read_tokenizer(args.model, cache_dir=_cache_dir(args))
        if tokenizer is not None and draft_tokenizer is not None:  # else nobody knows: of the Hub only configs are read
            check_same_tokens((draft_config, draft_tokenizer), (config, tokenizer))
        draft = DraftModelShape(config=draft_config, groups=draft_groups)
    devices = _devices(args)[: config.num_layers]
    num_prompts = len(read_prompts(Path(args.prompts_file))) if args.prompts_file is not None else None
    request = memory_request(args, num_prompts)
    spec, plans = plan_run(config, groups, request, context=args.context, devices=devices, draft=draft)
    links = [_link(device) if plan.num_streamed else None for device, plan in zip(devices, plans, strict=True)]
    where = "a CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    _print(plan_tables(plans, spec.context, where=where, links_bytes_per_s=links, batch=spec.num_slots))


def _link(device: jax.Device) -> float | None:
    """The rate of the device's link; None if there is no memory left to measure it with."""
    from vramjax.residency.link import link_bytes_per_s

    try:
        return link_bytes_per_s(device)
    except BudgetError:
        return None


def _devices(args: SimpleNamespace) -> list[jax.Device]:
    from vramjax.devices import choose_devices

    try:
        return choose_devices(_device_indices(args), name="--devices")
    except (RuntimeError, AssertionError) as error:  # some versions of JAX assert that there is one
        reason = str(error) or type(error).__name__
        raise ConfigError(f"JAX has no device ({reason}); check JAX_PLATFORMS and the driver") from error


def _device_indices(args: SimpleNamespace) -> list[int] | None:
    return None if args.devices is None else _whole_numbers("devices", args.devices, example="0,1")


def _cache_dir(args: SimpleNamespace) -> Path | None:
    try:
        return Path(args.cache_dir).expanduser() if args.cache_dir else None
    except RuntimeError as error:  # no such user
        raise ConfigError(f"--cache_dir is {args.cache_dir!r}; expected a directory: {error}") from None


def _whole_numbers(name: str, items: list[str], *, example: str) -> list[int]:
    if not items:
        raise ConfigError(f"--{name} is empty; expected whole numbers, such as {example}")
    try:
        return [int(item) for item in items]
    except ValueError:
        raise ConfigError(f"--{name} is {shown(','.join(items))}; expected whole numbers, such as {example}") from None
