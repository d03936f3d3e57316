"""What a model is: the numbers that fix its shapes and its arithmetic, whatever format they came from.

Knows nothing of weights, files or devices. `vramjax.config_hf` reads Hugging Face's config.json into these
classes, `vramjax.config_gguf` the metadata of a GGUF file. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vramjax.errors import ConfigError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_vl"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

FAMILIES: tuple[str, ...] = get_args(Family)
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
MAX_SIZE = 2**31 - 1  # of anything that is counted: indices are int32
MAX_LAYERS = 2_000  # none has a tenth of it; a plan for the layers of a wrong config still takes a second
LLAMA_THETA = 10000.0  # RoPE's theta in Llama before files had a key for it, which is what a file without one means


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into rotations; fields that a kind does not use keep their defaults.

    Invariant: the inverse frequencies of all positions follow from this and from `head_dim` alone.
    Example: Llama 3.1 is `kind="llama3", theta=5e5, factor=8, low_freq_factor=1, high_freq_factor=4,
    original_max_positions=8192`.
    """

    kind: RopeKind = "default"
    theta: float
    factor: float = 1.0  # linear, llama3, yarn: how far the context is stretched
    original_max_positions: int | None = None  # llama3, yarn: the context before stretching
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None is 0.1 * ln(factor) + 1
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    freq_factors: tuple[float, ...] | None = None  # [Hd / 2], divides the inverse frequencies

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope kind is {shown(self.kind)}; expected one of {', '.join(ROPE_KINDS)}")
        # Within these bounds every frequency and every phase is a finite float32.
        check_number("rope theta", self.theta, above=1.0, most=1e30)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            if (value := getattr(self, name)) is not None:
                check_number(f"rope {name}", value, least=1e-6, most=1e6)
        for value in self.freq_factors or ():
            check_number("rope freq_factors", value, least=1e-6, most=1e30)  # a huge one stands for no rotation
        if self.original_max_positions is not None:
            check_size("rope original_max_positions", self.original_max_positions)
        _check_flag("rope truncate", self.truncate)
        if self.kind in ("llama3", "yarn"):
            self._check_given("original_max_positions")
        if self.kind == "llama3":
            self._check_given("low_freq_factor", "high_freq_factor")
            assert self.low_freq_factor is not None and self.high_freq_factor is not None
            if self.high_freq_factor <= self.low_freq_factor:
                raise ConfigError(
                    f"rope high_freq_factor is {self.high_freq_factor}; expected more than low_freq_factor, "
                    f"which is {self.low_freq_factor}"
                )

    def _check_given(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                raise ConfigError(f"rope kind {self.kind!r} has no {name}; expected a number")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer: every tensor's shape and every constant of its arithmetic.

    Invariant: two checkpoints with equal ModelConfigs have the same tensors with the same shapes and are run by the
    same compiled programs.

    Example: SmolLM2-135M is `family="llama", num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9,
    num_kv_heads=3, head_dim=64, vocab_size=49152, tied_embeddings=True, rope=RopeConfig(theta=1e5)`, all biases
    and `qk_norm` False.
    """

    family: Family  # what the weights are; qwen3_vl means its text tower
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of every q and k head, before RoPE
    tied_embeddings: bool = False  # lm_head is the embedding; no head tensor is stored
    rope: RopeConfig
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # decoding stops on any of them

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"model family is {shown(self.family)}; expected one of {', '.join(FAMILIES)}")
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_positions",
        ):
            check_size(name, getattr(self, name))
        check_size("num_layers", self.num_layers, most=MAX_LAYERS)
        for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied_embeddings"):
            _check_flag(name, getattr(self, name))
        for name, ids in (("bos_token_id", (self.bos_token_id or 0,)), ("eos_token_ids", self.eos_token_ids)):
            if any(type(token_id) is not int or token_id < 0 for token_id in ids):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; expected token ids")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}; expected a multiple of num_kv_heads, which is {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; expected an even number, as RoPE turns pairs")
        check_number("rms_norm_eps", self.rms_norm_eps, least=1e-30, most=1.0)
        factors = self.rope.freq_factors
        if factors is not None and len(factors) != self.head_dim // 2:
            raise ConfigError(
                f"rope freq_factors has {len(factors)} numbers; expected head_dim / 2, which is {self.head_dim // 2}"
            )

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        notes: list[str] | None = None,
    ) -> ModelConfig:
        """Reads Hugging Face's config.json (and generation_config.json); see `vramjax.config_hf` for the rules.

        Args:
          config: what config.json holds.
          generation_config: what generation_config.json holds, if there is one: more stop ids.
          notes: gets one sentence for each choice that a reader should know about.

        Raises:
          ConfigError: a value is missing, contradictory, or of a model that vramjax cannot run.
        """
        from vramjax.config_hf import model_config_from_hf  # it builds this class

        return model_config_from_hf(config, generation_config, [] if notes is None else notes)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values that `from_json` turns back into an equal ModelConfig."""
        result = dataclasses.asdict(self)
        result["eos_token_ids"] = list(self.eos_token_ids)
        if self.rope.freq_factors is not None:
            result["rope"]["freq_factors"] = list(self.rope.freq_factors)
        return result

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The ModelConfig that `to_json` wrote.

        Raises:
          ConfigError: a key is missing or unknown, or a value is not allowed.
        """
        values = _exactly_the_fields(cls, data)
        rope = _exactly_the_fields(RopeConfig, values["rope"])
        if rope["freq_factors"] is not None:
            rope["freq_factors"] = tuple(rope["freq_factors"])
        return cls(**{**values, "rope": RopeConfig(**rope), "eos_token_ids": tuple(values["eos_token_ids"])})


def _exactly_the_fields(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"a stored {cls.__name__} is {shown(data)}; expected a JSON object")
    names = {field.name for field in dataclasses.fields(cls)}
    if missing := sorted(names - set(data)):
        raise ConfigError(f"a stored {cls.__name__} lacks {missing[0]!r}; expected exactly {sorted(names)}")
    if unknown := sorted(set(data) - names):
        raise ConfigError(f"a stored {cls.__name__} has {unknown[0]!r}; expected exactly {sorted(names)}")
    return dict(data)


def stop_notes(config: ModelConfig) -> list[str]:
    """A sentence for each stop id that no decoding can reach."""
    return [
        f"the stop id {token_id} is not in the vocabulary of {config.vocab_size}: decoding never stops on it"
        for token_id in config.eos_token_ids
        if token_id >= config.vocab_size
    ]


def check_size(name: str, value: Any, *, most: int = MAX_SIZE) -> int:
    """`value`, a whole number from 1 to `most`; ConfigError if it is none."""
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} is {shown(value)}; expected a whole number from 1 to {most}")
    return value


def check_number(name: str, value: Any, *, least: float = 0.0, above: float = 0.0, most: float = 1e30) -> float:
    """`value` as a float, above `above`, at least `least` and at most `most`; ConfigError if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > above and least <= value <= most):
        expected = f"of at least {least:g}" if least > above else f"above {above:g}"
        raise ConfigError(f"{name} is {shown(value)}; expected a number {expected} and at most {most:g}")
    return float(value)


def shown(value: Any) -> str:
    """What a file holds, as messages show it: never long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; expected true or false")
