"""The command line's flags: names, defaults, help and what is said about a value that is none.

Each command has its own set, made when it is needed, so that importing vramjax defines no flags in a program that has
flags of its own.
"""

from __future__ import annotations

import itertools
import os
import re
from types import SimpleNamespace

from absl import flags

from vramjax.config import shown
from vramjax.decode.depth import MAX_DEPTH
from vramjax.errors import ConfigError
from vramjax.memory_request import MemoryRequest

_FILES = ("prompts_file", "out", "stats_json")
DEFAULT_BATCH = 16  # rows of a tile on a GPU
_CACHE_HELP = "where converted models are kept; default $VRAMJAX_CACHE or ~/.cache/vramjax"
_MODEL_HELP = "a packed directory, a Hugging Face directory, a .gguf file, a Hub id such as Qwen/Qwen3-8B, or demo"


def decode_flags() -> flags.FlagValues:
    """Flags of `vramjax` and `scripts/decode.py`."""
    fv = flags.FlagValues()

    flags.DEFINE_string("model", None, _MODEL_HELP, flag_values=fv)
    flags.DEFINE_string("prompt", None, "text to answer or to continue", flag_values=fv)
    flags.DEFINE_list("prompt_ids", None, "token ids instead of a text, such as 1,2,3", flag_values=fv)
    flags.DEFINE_string(
        "prompts_file",
        None,
        'prompts to answer: a text file with one a line, or .jsonl with {"prompt": ...} a line',
        flag_values=fv,
    )
    flags.DEFINE_string("out", None, "where answers to --prompts_file go, one JSON line each", flag_values=fv)
    flags.DEFINE_integer(
        "batch",
        None,
        "prompts of --prompts_file to work on at the same time, each with a KV cache of its own: a sweep over the "
        f"layers gives each of them a token. Default: {DEFAULT_BATCH}, or fewer if that is faster within the budget",
        lower_bound=1,
        flag_values=fv,
    )
    flags.DEFINE_bool(
        "chat", None, "put the prompt into the model's chat template; default: if it has one", flag_values=fv
    )

    flags.DEFINE_integer("max_new_tokens", 256, "tokens to decode at most", lower_bound=0, flag_values=fv)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy", lower_bound=0, flag_values=fv)
    flags.DEFINE_integer("top_k", 0, "draw from the k likeliest tokens; 0 is off", lower_bound=0, flag_values=fv)
    flags.DEFINE_float("top_p", 1.0, "draw from the fewest tokens that together reach p; 1 is off", flag_values=fv)
    flags.DEFINE_integer("seed", 0, "of the draws; the same seed gives the same text", lower_bound=0, flag_values=fv)
    flags.DEFINE_string(
        "speculate",
        "auto",
        "guess what comes next from what was there before, and check guesses in the next sweep over the layers; the "
        "answer is the same, in fewer sweeps. auto: where layers are streamed, as many guesses as make it faster; off; "
        f"or so many in each sweep, 0 .. {MAX_DEPTH}",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "draft_model",
        None,
        "a small model that guesses what comes next, as --model and with the same tokenizer; all of it stays on the "
        "device, and counts for --device_budget",
        flag_values=fv,
    )
    flags.DEFINE_bool("ignore_stop", False, "go on after stop tokens, for measurements", flag_values=fv)

    flags.DEFINE_integer(
        "context",
        None,
        "positions that prompt and answer may take; default: what they need (with --plan: 4096)",
        lower_bound=1,
        flag_values=fv,
    )
    flags.DEFINE_string(
        "device_budget",
        None,
        "device memory for everything at its peak, such as 6GiB, 500MB or 6442450944; layers that do not fit are "
        "streamed. auto (the default): what is free now, other programs considered, less 512 MiB",
        flag_values=fv,
    )
    flags.DEFINE_integer(
        "keep",
        None,
        "layers on the device, instead of a budget in bytes",
        lower_bound=1,
        flag_values=fv,
    )
    flags.DEFINE_list(
        "devices",
        None,
        "several devices, by their places in jax.devices(), such as 0,1: layers are dealt out to them in turns, and "
        "each streams its own over its own link; --device_budget and --keep are what each of them may take",
        flag_values=fv,
    )
    flags.DEFINE_enum(
        "policy",
        "pinned_ring",
        ["pinned_ring", "past", "both_sides"],
        "which layers leave the device: the one just used, if it is not one of those that stay for good; or, for "
        "comparison, those behind a window of --keep layers, or (a trap) also those ahead of it",
        flag_values=fv,
    )
    flags.DEFINE_enum(
        "host",
        "auto",
        ["auto", "pinned", "mapped"],
        "where layers wait that are streamed: pinned in host memory, or on disk, from where each token reads them "
        "through a few buffers; auto: in host memory if they fit",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "host_budget", None, "host memory of the whole process, such as 16GiB; default: what is free", flag_values=fv
    )
    flags.DEFINE_enum(
        "release",
        "pool",
        ["pool", "free"],
        "what becomes of a released layer's memory: recycled, or (a trap, for comparison) really freed",
        flag_values=fv,
    )
    flags.DEFINE_bool(
        "warmup",
        None,
        "upload what a sweep begins with before the first one; default: if any layer stays on the device for good",
        flag_values=fv,
    )

    flags.DEFINE_bool(
        "plan",
        False,
        "like `vramjax plan`: print the schedule, the memory, and what each token uploads and takes on this link; load "
        "nothing. Of a model on the Hub only config.json is downloaded for it; the demo model, a small one, is whole",
        flag_values=fv,
    )
    flags.DEFINE_string(
        "stats_json",
        None,
        "file to write statistics to; not written if every prompt of --prompts_file is answered already",
        flag_values=fv,
    )
    flags.DEFINE_string("cache_dir", None, _CACHE_HELP, flag_values=fv)
    flags.DEFINE_bool("progress", True, "progress bars and notes on stderr", flag_values=fv)
    _define_help(fv)
    return fv


def convert_flags() -> flags.FlagValues:
    """Flags of `vramjax convert` and `scripts/convert.py`."""
    fv = flags.FlagValues()
    flags.DEFINE_enum("group", "128", ["32", "64", "128"], "inputs that share a scale", flag_values=fv)
    flags.DEFINE_bool("progress", True, "a progress bar and notes on stderr", flag_values=fv)
    _define_help(fv)
    return fv


def _define_help(fv: flags.FlagValues) -> None:
    flags.DEFINE_bool("help", False, "show this", short_name="h", flag_values=fv)
    flags.DEFINE_bool("version", False, "show the version", flag_values=fv)


def parse_flags(values: flags.FlagValues, args: list[str]) -> list[str]:
    """Sets `values` from the command line and returns the arguments that are no flags.

    A file may be in a user's directory: shells leave the ~ of --out=~/x as it is.

    Raises:
      ConfigError: a flag is unknown, lacks its value, or has one that it cannot have.
    """
    try:
        positional = values(["vramjax", *args])[1:]
    except flags.IllegalFlagValueError as error:
        match = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
        if match is None:
            raise ConfigError(str(error)) from error
        parser = values[match[1]].parser
        if isinstance(parser, flags.EnumParser):
            expected = f"one of {', '.join(parser.enum_values)}"
        elif isinstance(parser, flags.BooleanParser):
            expected = "true or false"
        else:
            expected = parser.syntactic_help
        raise ConfigError(f"--{match[1]} is {shown(match[2])}; expected {expected}") from error
    except flags.UnrecognizedFlagError as error:
        near = re.search(r"Did you mean: (\S+)", str(error))
        hint = f"did you mean --{near[1]}? " if near else ""
        raise ConfigError(f"there is no flag --{error.flagname}; {hint}vramjax --help lists all") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--flagfile is not UTF-8 ({error}); expected a text file with a flag a line") from error
    except flags.CantOpenFlagFileError as error:
        reason = str(error).removeprefix("ERROR:: Unable to open flagfile: ")
        raise ConfigError(f"--flagfile cannot be read: {reason}; expected a text file with a flag a line") from error
    except (flags.Error, ValueError) as error:  # the latter where --nochat=true has a value
        raise ConfigError(f"{error}; vramjax --help lists all flags") from error
    for name in _FILES:
        if name in values and values[name].present:
            values[name].value = os.path.expanduser(str(values[name].value))
    return positional


def check_decode_flags(args: SimpleNamespace) -> None:
    """Checks what flags of `decode_flags` say together, before anything is done.

    Raises:
      ConfigError: one is missing, or two exclude each other.
    """
    for command, usage in (("convert", "convert SRC DST"), ("plan", "plan --model=MODEL")):
        if args.positional[:1] == [command]:
            raise ConfigError(f"{command} comes after a flag; expected it first: vramjax {usage}")
    if args.positional:
        raise ConfigError(f"unknown argument {args.positional[0]!r}; expected flags only, such as --prompt=...")
    if args.model is None:
        raise ConfigError("--model is missing; expected a path, a Hub id, or demo")
    given = [name for name in ("prompt", "prompt_ids", "prompts_file") if getattr(args, name) is not None]
    if len(given) != 1 and not args.plan:
        raise ConfigError(f"got {' and '.join(f'--{name}' for name in given) or 'no prompt'}; expected one prompt flag")
    if (args.prompts_file is None) != (args.out is None) and not args.plan:
        raise ConfigError("--prompts_file and --out belong together; expected both or neither")
    if args.batch is not None and args.prompts_file is None and not args.plan:
        raise ConfigError("--batch is for many prompts; expected it with --prompts_file (or vramjax plan)")
    if args.chat and args.prompt_ids is not None:
        raise ConfigError("--chat cannot be used with --prompt_ids, which are encoded already; expected one of the two")
    memory_request(args).check_draft_model(args.draft_model)
    if args.plan and args.stats_json is not None:
        raise ConfigError("--plan decodes nothing that --stats_json could tell of; expected one of the two")
    files = [name for name in _FILES if getattr(args, name) is not None]
    for name, other in itertools.combinations(files, 2):
        if _is_same_file(getattr(args, name), getattr(args, other)):
            raise ConfigError(f"--{name} and --{other} are the same file, {getattr(args, name)}; expected two")
    for name, other in itertools.product(("model", "draft_model"), ("out", "stats_json")):
        model, written = os.path.expanduser(getattr(args, name) or ""), getattr(args, other)
        if written is not None and os.path.isfile(model) and _is_same_file(model, written):
            raise ConfigError(f"--{name} and --{other} are the same file, {model}; expected two")
    if args.stats_json is not None and os.path.isfile(args.stats_json):
        for stream in ("stderr",) if args.out is not None else ("stdout", "stderr"):  # answers go to one of the two
            if _is_same_file(args.stats_json, f"/dev/{stream}"):
                raise ConfigError(f"--stats_json and {stream} are the same file, {args.stats_json}; expected two")


def memory_request(args: SimpleNamespace, num_prompts: int | None = None) -> MemoryRequest:
    """What flags of `decode_flags` say of memory.

    Args:
      args: the flags.
      num_prompts: prompts that there are to answer; None: not known.

    Raises:
      ConfigError: a size is none, or two flags exclude each other.
    """
    batch = args.batch or (1 if num_prompts is None else DEFAULT_BATCH)
    return MemoryRequest(
        device_budget=args.device_budget,
        keep=args.keep,
        policy=args.policy,
        warm_up=args.warmup,
        host=args.host,
        host_budget=args.host_budget,
        batch=batch if num_prompts is None else min(batch, num_prompts),
        batch_or_fewer=args.batch is None,
        # So many digits and no more: Python does not make numbers of thousands of them.
        speculate=int(args.speculate) if re.fullmatch(r"-?[0-9]{1,20}", args.speculate) else args.speculate,
    )


def _is_same_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)  # by whatever name
    except OSError:  # one is yet to be written
        return os.path.realpath(path) == os.path.realpath(other)
