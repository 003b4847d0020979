"""A llama-architecture GGUF file -> a directory in Hugging Face form. Needs numpy and gguf, not torch.

Written from the GGUF specification and llama.cpp's convert_hf_to_gguf.py, whose steps are undone here: the rows of
attn_q and attn_k are interleaved there for llama.cpp's rotary embedding, and must be put back.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evap.errors import StartupError

Float32 = npt.NDArray[np.float32]
#: (what is done, units done, units in all); all 0 while the end is not known.
Progress = Callable[[str, int, int], None]

#: tokenizer.ggml.token_type: 1 normal, 3 control, 4 user defined (llama.cpp, llama_token_type).
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: tokenizer.ggml.pre -> pre-tokenizer of tokenizer.json. Others are refused: a wrong split is wrong text.
_PRE_TOKENIZERS: Final[dict[str, list[dict[str, Any]]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "gpt-2": [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}],
}


def hf_name(gguf_name: str) -> str:
    """Parameter name in a Hugging Face Llama for a tensor of a GGUF llama. Raises StartupError for an unknown one."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise StartupError(f"the GGUF file has a tensor this converter does not know: {gguf_name[:64]!r}")


def unpermute(weight: Float32, heads: int) -> Float32:
    """Undo llama.cpp's row order of q and k: (heads, head_dim/2, 2, ...) back to (heads, 2, head_dim/2, ...)."""
    rows = weight.shape[0]
    shape = (heads, rows // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(values: Float32) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16 (ties to even). Finite input only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], data: Iterator[npt.NDArray[np.uint16]]) -> None:
    """Write bfloat16 tensors, one at a time, in the order of `shapes` (safetensors format: u64 length, JSON, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for array in data:
            out.write(array.tobytes())
        if out.tell() != 8 + len(text) + offset:
            raise StartupError(f"{path.name}: tensors have other sizes than announced")
        out.flush()
        os.fsync(out.fileno())


def convert(gguf_path: Path, target: Path, progress: Progress) -> None:
    """Fill the existing directory `target` from a GGUF file: weights, config, tokenizer, chat template.

    Raises StartupError for another architecture, an unknown pre-tokenizer, or when the gguf package is missing.
    """
    try:
        from gguf import GGUFReader  # noqa: PLC0415  (optional dependency)
    except ImportError as e:
        raise StartupError("converting a GGUF model needs the gguf package", remedy="pip install 'evap[torch]'") from e
    progress("reading model file", 0, 0)
    try:
        reader = GGUFReader(str(gguf_path))
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError) as e:
        raise StartupError(f"{gguf_path.name} is not a readable GGUF file: {e}", remedy="fetch the model again") from e
    if meta.get("general.architecture") != "llama":
        raise StartupError(f"GGUF architecture {meta.get('general.architecture')!r} is not supported (only llama)")
    names = {t.name for t in reader.tensors}
    tied = "output.weight" not in names
    _write_json(target / "config.json", model_config(meta, tied))
    _write_json(target / "generation_config.json", _generation_config(meta))
    _write_json(target / "tokenizer.json", tokenizer_json(meta))
    _write_json(target / "tokenizer_config.json", tokenizer_config(meta))
    _convert_weights(reader.tensors, meta, target / "model.safetensors", progress)


def _convert_weights(tensors: Any, meta: dict[str, Any], path: Path, progress: Progress) -> None:
    from gguf import dequantize  # noqa: PLC0415

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    shapes = {hf_name(t.name): tuple(int(n) for n in reversed(t.shape)) for t in tensors}

    def arrays() -> Iterator[npt.NDArray[np.uint16]]:
        for done, tensor in enumerate(tensors, 1):
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            weight = weight.reshape(shapes[hf_name(tensor.name)])
            kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
            if kind in heads:
                weight = unpermute(weight, heads[kind])
            yield to_bfloat16(weight)
            progress("converting weights", done, len(tensors))

    write_safetensors(path, shapes, arrays())


def model_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of a Hugging Face LlamaForCausalLM."""
    heads = meta["llama.attention.head_count"]
    hidden = meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # float32 in the file: 9.999999747378752e-06 stands for 1e-05
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }


def _added_tokens(meta: dict[str, Any]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    pairs = zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True)
    return [
        {"id": i, "content": token, **flags, "special": kind == _CONTROL}
        for i, (token, kind) in enumerate(pairs)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def tokenizer_json(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE tokenizer ("gpt2" in GGUF)."""
    pre = meta.get("tokenizer.ggml.pre")
    if meta.get("tokenizer.ggml.model") != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise StartupError(f"GGUF tokenizer {meta.get('tokenizer.ggml.model')!r}/{pre!r} is not supported")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(meta),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])},
            "merges": [pair.split(" ") for pair in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with the chat template. The class is the generic one: others rebuild the pre-tokenizer."""
    tokens = meta["tokenizer.ggml.tokens"]

    def token(key: str) -> str | None:
        i = meta.get(f"tokenizer.ggml.{key}_token_id")
        return None if i is None else tokens[i]

    added = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in _added_tokens(meta)}
    config = {
        "add_prefix_space": False,
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "added_tokens_decoder": added,
        "bos_token": token("bos"),
        "chat_template": meta.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": token("eos"),
        "model_max_length": meta["llama.context_length"],
        "pad_token": token("padding"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token("unknown"),
    }
    return {k: v for k, v in config.items() if v is not None}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
