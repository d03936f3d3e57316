"""Makes tests/goldens/*.npz: the logits of transformers, in float32 with eager attention, for every tiny variant.

    pip install torch transformers
    python tests/make_goldens.py [variant ...]

tests/tiny.py says what the files hold. The tests read them and need neither torch nor transformers. A
prompt is taken only if no greedy choice after it is close, and float64 has to agree with float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny

NUM_PROMPT, NUM_NEW, NUM_LONG = 40, 16, 300


def load(directory: Path, variant: str, dtype: str) -> Any:
    """The transformers model of a directory, computing in `dtype`."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    loader = (
        transformers.Qwen3VLForConditionalGeneration if variant == "qwen3_vl" else transformers.AutoModelForCausalLM
    )
    model, info = loader.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
    )
    # The vision tower of qwen3_vl is only hinted at; everything else has to be there.
    assert not [n for n in info["missing_keys"] if "visual" not in n], info
    assert not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def forward(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] at every position of tokens [T]."""
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return model(input_ids=ids, use_cache=False).logits[0].numpy()


def make(variant: str) -> None:
    model = tiny.tiny_model(variant)
    with tempfile.TemporaryDirectory() as tmp:
        directory = tiny.write_model(Path(tmp), model)
        single, double = (load(directory, variant, dtype) for dtype in ("float32", "float64"))

    stop_ids = model.generation_config["eos_token_id"]
    for attempt in range(100):
        tokens = tiny.prompt_ids(variant, NUM_PROMPT, attempt)
        for _ in range(NUM_NEW):
            tokens = np.append(tokens, forward(single, tokens)[-1].argmax()).astype(np.int32)
        logits = forward(single, tokens)
        top = np.sort(logits[NUM_PROMPT - 1 : -1], axis=1)
        margin = (top[:, -1] - top[:, -2]).min()
        repeats = len(set(tokens[NUM_PROMPT:].tolist())) < 6
        if margin > 0.05 and not repeats and not set(tokens.tolist()) & set(stop_ids):
            break
    else:
        raise SystemExit(f"{variant}: no prompt has a continuation without close choices or stop ids")

    arrays: dict[str, Any] = {"tokens": tokens, "num_prompt": NUM_PROMPT, "logits": logits}
    errors = [np.abs(logits - forward(double, tokens)).max()]
    if variant in tiny.LONG_VARIANTS:
        long_tokens = tiny.prompt_ids(variant, NUM_LONG)
        long_logits = forward(single, long_tokens)[-4:]
        errors.append(np.abs(long_logits - forward(double, long_tokens)[-4:]).max())
        arrays |= {"long_tokens": long_tokens, "long_logits": long_logits}
    assert max(errors) < 1e-3, f"{variant}: float32 is off float64 by {max(errors)}"

    np.savez_compressed(tiny.GOLDENS / f"{variant}.npz", weights_sha256=np.array(tiny.fingerprint(model)), **arrays)
    print(
        f"{variant:18} prompt {attempt}, logits std {logits.std():.2f} max {np.abs(logits).max():.1f}, "
        f"float64 differs by {max(errors):.1e}, smallest greedy margin {margin:.3f}"
    )


if __name__ == "__main__":
    tiny.GOLDENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or tiny.VARIANTS:
        make(name)
