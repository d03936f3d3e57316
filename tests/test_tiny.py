"""The tiny checkpoints are what tests/tiny.py promises, and the goldens belong to them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open
from tiny import LONG_VARIANTS, VARIANTS, fingerprint, load_golden, tiny_model, write_model, write_tiny

from vramjax.quantize import dequantize, quantize


@pytest.mark.parametrize("variant", VARIANTS)
def test_goldens_belong_to_the_weights(variant: str):
    golden = load_golden(variant)
    tiny = tiny_model(variant)
    assert str(golden["weights_sha256"]) == fingerprint(tiny)
    vocab = tiny.config.get("text_config", tiny.config)["vocab_size"]
    assert golden["num_prompt"] == 40
    assert golden["tokens"].shape == (56,)
    assert golden["logits"].shape == (56, vocab)
    assert golden["logits"].dtype == np.float32
    assert (golden["logits"][39:-1].argmax(axis=1) == golden["tokens"][40:]).all()
    assert ("long_logits" in golden) == (variant in LONG_VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_exact_in_q8_and_in_every_float_type(variant: str):
    for name, tensor in tiny_model(variant).tensors.items():
        assert (tensor.astype(np.float16) == tensor).all(), name
        assert not (tensor.view(np.uint32) & 0xFFFF).any(), name  # bfloat16 keeps the upper half
        if tensor.ndim == 2:
            for group in (32, 64, 128):
                assert (dequantize(quantize(tensor, group)) == tensor).all(), (name, group)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("float16", 2), ("float32", 4)])
def test_files_hold_the_tensors(tmp_path, dtype: str, shards: int):
    directory = write_tiny(tmp_path, "qwen2", dtype=dtype, shards=shards)
    tensors = {}
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) == shards
    for path in files:
        with safe_open(path, framework="np") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = tiny_model("qwen2").tensors
    assert tensors.keys() == expected.keys()
    assert all((tensors[n] == expected[n]).all() and tensors[n].dtype == dtype for n in tensors)


def test_mixed_dtypes(tmp_path):
    write_model(tmp_path, tiny_model("llama"), dtype="mixed")
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert set(dtypes.values()) == {"BF16", "F32", "F16"}
    assert dtypes["lm_head.weight"] == "F16"
