"""A small model that drafts for a large one: what it takes, whether it has the same tokens, and loading it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax

from vramjax.checkpoint.packed import head_bytes
from vramjax.config import ModelConfig
from vramjax.decode.engine import Engine
from vramjax.decode.model_drafting import DraftModel
from vramjax.decode.spec import EngineSpec
from vramjax.errors import ConfigError, VramjaxError
from vramjax.host_tier import HostPlan, Weights, make_store, upload_head
from vramjax.layout import LayerLayout
from vramjax.progress import progress_bar
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.policy import resident
from vramjax.residency.transfer import out_of_memory_is_a_budget_error
from vramjax.text.tokenizer import Tokenizer

_EXPECTED = "expected the same tokenizer: choose a smaller model of the same family"


@dataclass(frozen=True, kw_only=True)
class DraftModelShape:
    """The shape of a model that drafts, from which its memory follows; no weights are needed for it.

    Invariant: it has a slot for each sequence of the large model, of the same context or of its own maximum if that is
    less; all of it is on one device for good.

    Example: 28 layers of 15 MB, an embedding of 160 MB, and 117 kB of keys and values for each position of each slot.
    """

    config: ModelConfig
    groups: Mapping[str, int]  # matrix name -> inputs per group

    def spec(self, large: EngineSpec) -> EngineSpec:
        """What the small model's engine is compiled for where the large one's is compiled for `large`."""
        context = min(large.context, self.config.max_positions)
        return dataclasses.replace(
            large,
            config=self.config,
            layout=LayerLayout.of(self.config, self.groups),
            groups=tuple(sorted(self.groups.items())),
            context=context,
            chunks_per_block=large.chunks_per_block if large.block_sizes[-1] <= context else 1,
            depth=0,
        )

    def num_bytes(self, large: EngineSpec) -> int:
        """All that it takes on the device: layers, both ends, KV cache and workspace."""
        spec = self.spec(large)
        layers = self.config.num_layers * spec.layout.num_bytes
        return layers + head_bytes(self.config, self.groups) + spec.kv_bytes + spec.workspace_bytes


@contextlib.contextmanager
def errors_name_draft_model() -> Iterator[None]:
    """Around what opens the model that drafts: a user has named two, and is told which one is meant."""
    try:
        yield
    except VramjaxError as error:
        raise type(error)(f"draft_model: {error}") from error


def check_same_tokens(draft: tuple[ModelConfig, Tokenizer | None], large: tuple[ModelConfig, Tokenizer | None]) -> None:
    """Checks that what is a token to one model is the same token to the other.

    The models' vocabularies are padded as it happens, so that their tokenizers are what counts, if they have any.

    Raises:
      ConfigError: it is not; the message says what differs.
    """
    (draft_config, draft_tokenizer), (config, tokenizer) = draft, large
    if (draft_tokenizer is None) != (tokenizer is None):
        has, has_not = ("the model", "draft_model") if draft_tokenizer is None else ("draft_model", "the model")
        raise ConfigError(f"{has} has a tokenizer and {has_not} has none; {_EXPECTED}")
    if draft_tokenizer is None or tokenizer is None:
        sizes = draft_config.vocab_size, config.vocab_size
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"draft_model has a vocabulary of {sizes[0]} and the model one of {sizes[1]}; {_EXPECTED}"
            )
        return
    drafted, known = draft_tokenizer.vocabulary, tokenizer.vocabulary
    different = sorted(i for i in drafted.keys() | known.keys() if drafted.get(i) != known.get(i))
    if not different:
        return
    first = different[0]
    sizes = f"draft_model has a vocabulary of {len(drafted)} tokens and the model one of {len(known)}"
    raise ConfigError(
        f"{sizes}, of which {len(different)} differ, as token {first}: {_shown(drafted.get(first))} in draft_model, "
        f"{_shown(known.get(first))} in the model; {_EXPECTED}"
    )


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)


@contextlib.contextmanager
def loaded_draft_model(
    weights: Weights, large: EngineSpec, device: jax.Device, *, progress: bool
) -> Iterator[DraftModel]:
    """A small model that drafts, all of which is on the device meanwhile.

    Args:
      weights: of the small model.
      large: the large model's engine.
      device: where both ends of the large model are.
      progress: whether to show a bar on stderr.

    Raises:
      CheckpointError: a file changed since it was written.
      BudgetError: the device has no memory left for it.
    """
    num_layers, transfer = weights.config.num_layers, FusedTransfer(device)
    schedule = resident(num_layers)
    with contextlib.ExitStack() as opened:
        total = num_layers * weights.layout.num_bytes
        with (
            progress_bar("Loading the draft model", total=total, enabled=progress) as advance,
            out_of_memory_is_a_budget_error(device, "the draft model"),
        ):
            head = upload_head(weights, transfer)
            opened.callback(transfer.free, head)
            store = make_store(weights, range(num_layers), schedule, HostPlan(tier="none"), device, advance)
            opened.callback(store.close)
            controller = Controller(store, schedule, transfer)
            opened.callback(controller.close)
            spec = DraftModelShape(config=weights.config, groups=weights.groups).spec(large)
            engine = Engine(spec=spec, head=head, controller=controller, device=device, gives_logits=False)
            opened.callback(engine.close)
            engine.compile()
            controller.warm_up()
            model = DraftModel(engine, vocab_size=large.config.vocab_size)
        yield model
