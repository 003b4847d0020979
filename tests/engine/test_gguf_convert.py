from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from evap.engine.gguf_convert import (
    Float32,
    convert,
    hf_name,
    to_bfloat16,
    tokenizer_json,
    unpermute,
    write_safetensors,
)
from evap.errors import StartupError
from tests.engine import small_tokenizers as small

gguf = pytest.importorskip("gguf", reason="the gguf package (extra: torch) is not installed")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 64


def permute(weight: Float32, heads: int) -> Float32:
    """llama.cpp's LlamaModel.permute, word for word in meaning."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> dict[str, Float32]:
    """A GGUF file of a random one-layer Llama; returns its weights under their Hugging Face names."""
    rng = np.random.default_rng(0)
    vocab = json.loads(small.byte_level().to_str())["model"]["vocab"]
    tokens = sorted(vocab, key=lambda t: vocab[t])
    merges = json.loads(small.byte_level().to_str())["model"]["merges"]
    shapes = {
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "output_norm.weight": (HIDDEN,),
        "token_embd.weight": (len(tokens), HIDDEN),
    }
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    out: Any = gguf.GGUFWriter(path, architecture)
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(1)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3 if t in small.SPECIAL else 1 for t in tokens])
    out.add_token_merges([" ".join(m) for m in merges])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(small.TEMPLATE)
    for name, weight in weights.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[2] if name.startswith("blk") else "")
        stored = permute(weight, heads) if heads else weight
        if name == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            out.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, stored)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return {hf_name(name): weight for name, weight in weights.items()}


def read_safetensors(path: Path) -> dict[str, Float32]:
    """Through the safetensors library, bfloat16 widened by hand."""
    safetensors = pytest.importorskip("safetensors", reason="safetensors (extra: torch) is not installed")
    found = {}
    for name, info in safetensors.deserialize(path.read_bytes()):
        assert info["dtype"] == "BF16"
        bits = np.frombuffer(bytes(info["data"]), "<u2").astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(info["shape"])
    return found


def test_weights_come_out_as_they_were(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "x.gguf")
    seen: list[tuple[str, int, int]] = []
    (tmp_path / "out").mkdir()
    convert(tmp_path / "x.gguf", tmp_path / "out", lambda *a: seen.append(a))
    found = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].shape == weight.shape
        np.testing.assert_allclose(found[name], weight, atol=0.03, rtol=0.01, err_msg=name)
    assert seen[-1] == ("converting weights", len(expected), len(expected))


def test_config_and_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    convert(tmp_path / "x.gguf", tmp_path, lambda *a: None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (10000.0, 1e-05, True)
    assert config["vocab_size"] == small.byte_level().get_vocab_size()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*small.CORPUS, "<|im_start|>user\n123 it's<|im_end|>"]:
        ids = small.byte_level().encode(text).ids
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == small.byte_level().decode(ids)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == small.TEMPLATE
    assert settings["eos_token"] == "<|im_end|>"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(("what", "words"), [({"architecture": "mamba"}, "mamba"), ({"pre": "llama-bpe"}, "llama-bpe")])
def test_what_it_does_not_know_is_refused(tmp_path: Path, what: dict[str, str], words: str) -> None:
    write_gguf(tmp_path / "x.gguf", **what)
    with pytest.raises(StartupError, match=words):
        convert(tmp_path / "x.gguf", tmp_path, lambda *a: None)


def test_unknown_tensors_and_tokenizers() -> None:
    for name in ("blk.0.attn_q.bias.more", "blk.x.attn_q.weight", "rope_freqs.weight", "blk.0.ssm_in.weight"):
        with pytest.raises(StartupError, match="does not know"):
            hf_name(name)
    with pytest.raises(StartupError, match="not supported"):
        tokenizer_json({"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"})


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(StartupError, match="not a readable GGUF"):
        convert(tmp_path / "x.gguf", tmp_path, lambda *a: None)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_unpermute_undoes_permute(heads: int, half: int, columns: int) -> None:
    weight = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(heads * 2 * half, columns)
    assert (unpermute(permute(weight, heads), heads) == weight).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_bfloat16_is_the_nearest(values: list[float]) -> None:
    array = np.array(values, np.float32)
    bits = to_bfloat16(array)

    def widen(b: Any) -> Any:
        return (b.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(widen(bits) - array)
        finite = np.isfinite(widen(bits))
        for step in (-1, 1):
            beside = widen((bits.astype(np.int32) + step).astype(np.uint16))
            worse = ~np.isfinite(beside) | (np.abs(beside - array) >= error) | (np.sign(beside) != np.sign(array))
            assert (worse | ~finite).all()


def test_bfloat16_ties_go_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    assert to_bfloat16(ties).tolist() == [0x3F80, 0x3F82]


def test_a_tensor_of_another_size_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="other sizes"):
        write_safetensors(tmp_path / "x", {"a": (4,)}, iter([np.zeros(3, np.uint16)]))
