"""A random one-layer Llama with a real byte-level tokenizer: an engine so fast that the front-end is what is measured.

    python -m bench.tiny_llama DIR [--letters]

Hidden size 64, vocabulary 2,048, context 4,096. Its text is nonsense; every token of the vocabulary is likely, so
streams do not end early when `ignore_eos` is set. The same seed gives the same weights.

--letters: a vocabulary of single bytes. Those that can be seen are likely, and with `top_k` 20 nothing else is drawn: a
client that counts characters counts tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 2048
CONTEXT = 4096
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 1, 32, 128
BOS, EOS = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(layers: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP,
        "vocab_size": vocab, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }  # fmt: skip


def weights(layers: int, seed: int, whole: np.ndarray) -> dict[str, np.ndarray]:
    """`whole`: bool, shape (vocabulary,), whole characters; other tokens become unlikely, as in real text."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.08, shape).astype(np.float32)

    vocab = len(whole)
    found = {"model.embed_tokens.weight": normal(vocab, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    found["lm_head.weight"] = normal(vocab, HIDDEN) * whole[:, None]
    for i in range(layers):
        at = f"model.layers.{i}."
        found |= {
            at + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            at + "mlp.gate_proj.weight": normal(MLP, HIDDEN),
            at + "mlp.up_proj.weight": normal(MLP, HIDDEN),
            at + "mlp.down_proj.weight": normal(HIDDEN, MLP),
            at + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            at + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return found


def tokenizer(path: Path, *, letters: bool) -> np.ndarray:
    """Byte-level BPE, trained on texts that every Python has, plus words beyond ASCII. Returns which tokens are whole
    characters: bool, shape (VOCAB,). letters: no token of several bytes; returns which can be seen, shape (258,)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2 + 256 if letters else VOCAB,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(json.__file__).parent.parent
    texts = [(library / name).read_text("utf-8") for name in ("argparse.py", "ast.py", "typing.py", "ipaddress.py")]
    bpe.train_from_iterator([*texts, "naïve café 你好,世界 😀 привет мир " * 20], trainer)
    while not letters and (size := bpe.get_vocab_size()) < VOCAB:
        bpe.add_tokens([f"<extra_{size}>"])
    bpe.save(str(path / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": TEMPLATE}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    texts = [bpe.decode([i]) for i in range(bpe.get_vocab_size())]
    return np.array([t.isascii() and t.isprintable() and t != "" if letters else "\ufffd" not in t for t in texts])


def build(path: Path, *, layers: int = 1, seed: int = 0, letters: bool = False) -> Path:
    """Write the model into `path` unless it is there. Returns `path`."""
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    whole = tokenizer(path, letters=letters)
    (path / "config.json").write_text(json.dumps(config(layers, len(whole)), indent=1))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    part = path / "model.safetensors.part"
    save_file(weights(layers, seed, whole), str(part), metadata={"format": "pt"})
    part.rename(path / "model.safetensors")  # last: whoever sees it sees a whole model
    return path


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), letters="--letters" in sys.argv[2:]))
