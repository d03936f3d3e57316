"""The command line: `vramjax` decodes, `vramjax convert` packs a checkpoint. No arithmetic of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from absl import flags

from vramjax._version import __version__
from vramjax.errors import ConfigError, VramjaxError
from vramjax.flags import convert_flags, decode_flags
from vramjax.progress import progress_bar
from vramjax.prompts import AnswerFile, read_prompts
from vramjax.report import plan, summary

if TYPE_CHECKING:
    from vramjax.decode.sampler import Sampling
    from vramjax.language_model import Generation, LanguageModel

USAGE = """\
Decodes a language model, layer by layer through a bounded window of device memory.

  vramjax --model=demo --prompt='Why is the sky blue?'          every layer resident
  vramjax --model=Qwen/Qwen3-8B --keep=8 --prompt='...'         a window of 8 layers
  vramjax --model=MODEL --prompts_file=F.txt --out=F.jsonl      many prompts; a rerun goes on where it stopped
  vramjax --model=MODEL --keep=8 --plan                         what that would cost, without loading it
  vramjax convert SRC DST                                       pack a checkpoint as Q8 for streaming
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the installed command; exits with 0, 1 (an error, said in one line) or 130 (interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    # What users see are our own one-line warnings, not the line of source that Python would add.
    warnings.showwarning = lambda message, *args, **kwargs: print(f"warning: {message}", file=sys.stderr)
    try:
        if args[:1] == ["convert"]:
            _convert(_parse(convert_flags(), args[1:], usage="vramjax convert SRC DST [--group=128]"))
        else:
            _decode(_parse(decode_flags(), args[args[:1] == ["decode"] :], usage=USAGE))
    except (VramjaxError, flags.Error) as error:
        sys.exit(_fail(str(error)))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone: nothing is wrong here
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def _parse(values: flags.FlagValues, args: list[str], *, usage: str) -> SimpleNamespace:
    """Flags as attributes, and `positional`."""
    positional = values(["vramjax", *args])[1:]
    if values["help"].value:
        print(f"{usage}\n{values.get_help()}")
        sys.exit(0)
    if values["version"].value:
        print(__version__)
        sys.exit(0)
    return SimpleNamespace(**values.flag_values_dict(), positional=positional)


def _convert(args: SimpleNamespace) -> None:
    from vramjax.checkpoint.convert import convert
    from vramjax.checkpoint.resolve import default_cache_dir, locate, open_source

    if len(args.positional) != 2:
        raise ConfigError(f"convert got {len(args.positional)} arguments; expected a source and a destination")
    source = open_source(locate(args.positional[0], cache_dir=default_cache_dir(), progress=args.progress))
    if args.progress:
        for note in source.notes:
            print(f"note: {note}", file=sys.stderr)
    print(convert(source, Path(args.positional[1]), group=int(args.group), progress=args.progress))


def _decode(args: SimpleNamespace) -> None:
    if args.positional:
        raise ConfigError(f"unknown argument {args.positional[0]!r}; expected flags only, such as --prompt=...")
    if args.model is None:
        raise ConfigError("--model is missing; expected a path, a Hub id, or demo")
    given = [name for name in ("prompt", "prompt_ids", "prompts_file") if getattr(args, name) is not None]
    if len(given) != 1 and not args.plan:
        raise ConfigError(f"got {' and '.join(f'--{name}' for name in given) or 'no prompt'}; expected one prompt flag")
    if (args.prompts_file is None) != (args.out is None) and not args.plan:
        raise ConfigError("--prompts_file and --out belong together; expected both or neither")
    if args.release == "free":
        # Only this allocator gives memory back to the driver. It is chosen when JAX starts, so before the import.
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    if args.plan:
        _print_plan(args)
        return

    from vramjax.decode.sampler import Sampling

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    if args.prompts_file is not None:
        _answer_file(args, sampling)
    else:
        _answer_one(args, sampling)


def _answer_one(args: SimpleNamespace, sampling: Sampling) -> None:
    """Decodes one prompt, printing tokens as they come."""
    prompt = args.prompt if args.prompt is not None else _parse_ids(args.prompt_ids)
    with _load(args, [prompt]) as model:
        generation = _generate(args, model, prompt, sampling)
        for token in generation:
            print(token.text, end="", flush=True)
        print(flush=True)
        _report(args, model)


def _answer_file(args: SimpleNamespace, sampling: Sampling) -> None:
    """Decodes every prompt of a file that has no answer yet."""
    prompts = read_prompts(Path(args.prompts_file))
    settings = {name: getattr(args, name) for name in ("model", "chat", "max_new_tokens", "ignore_stop")}
    answers = AnswerFile(Path(args.out), prompts, settings | dataclasses.asdict(sampling))
    waiting = [prompt for prompt in prompts if prompt.index not in answers.done]
    if answers.done:
        print(f"{len(answers.done)} of {len(prompts)} prompts are already answered in {args.out}", file=sys.stderr)
    if not waiting:
        return
    with (
        closing(answers),
        _load(args, [prompt.content for prompt in waiting]) as model,
        progress_bar("Answering", total=len(waiting), unit="items", enabled=args.progress) as advance,
    ):
        for prompt in waiting:
            generation = _generate(args, model, prompt.content, sampling).finish()
            answers.append(prompt, generation)
            advance(1)
        _report(args, model)


def _load(args: SimpleNamespace, prompts: list[Any]) -> LanguageModel:
    """The model, with a context that the longest of `prompts` and its answer fit into, if none was asked for."""
    from vramjax.checkpoint.resolve import open_model
    from vramjax.language_model import LanguageModel
    from vramjax.text.prompt import encode_prompt
    from vramjax.text.tokenizer import Tokenizer

    packed = open_model(args.model, cache_dir=_cache_dir(args), progress=args.progress)
    tokenizer = Tokenizer.from_dir(packed.path)
    longest = max(len(encode_prompt(tokenizer, prompt, chat=args.chat)) for prompt in prompts)
    context = args.context or min(longest + args.max_new_tokens, packed.config.max_positions)
    if longest > context:
        raise ConfigError(
            f"the longest prompt has {longest} tokens; expected at most {context}, "
            + ("what --context says" if args.context else "the model's maximum")
        )
    return LanguageModel(
        packed,
        tokenizer,
        keep=args.keep,
        policy=args.policy,
        release=args.release,
        warm_up=args.warmup,
        context=context,
        progress=args.progress,
    )


def _generate(args: SimpleNamespace, model: LanguageModel, prompt: Any, sampling: Sampling) -> Generation:
    return model.generate(
        prompt,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        chat=args.chat,
        ignore_stop=args.ignore_stop,
    )


def _report(args: SimpleNamespace, model: LanguageModel) -> None:
    stats = model.stats()
    if args.stats_json is not None:
        try:
            Path(args.stats_json).write_text(json.dumps(stats, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--stats_json {args.stats_json} cannot be written: {error.strerror}") from error
    print(f"\n{summary(stats)}", file=sys.stderr)


def _print_plan(args: SimpleNamespace) -> None:
    import jax

    from vramjax.checkpoint.packed import head_bytes
    from vramjax.checkpoint.resolve import read_geometry
    from vramjax.language_model import device_bytes, engine_spec, make_schedule

    config, groups = read_geometry(args.model, cache_dir=_cache_dir(args), progress=args.progress)
    spec = engine_spec(config, groups, context=args.context, device=jax.devices()[0])
    schedule = make_schedule(config.num_layers, args.keep, args.policy, warm=args.warmup)
    print(plan(schedule, device_bytes(spec, schedule, head_bytes(config, groups)), spec.context))


def _cache_dir(args: SimpleNamespace) -> Path | None:
    return Path(args.cache_dir).expanduser() if args.cache_dir else None


def _parse_ids(items: list[str]) -> list[int]:
    try:
        return [int(item) for item in items]
    except ValueError:
        raise ConfigError(f"--prompt_ids is {','.join(items)!r}; expected whole numbers, such as 1,2,3") from None
