"""Small tokenizers of the kinds that models have, trained in the test in milliseconds."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?\n\n    indented code = {'a': [1, 2]}\r\n",
    "user assistant system hello world capital of France Paris answer question\n\tMore text, and more text!",
    "Grüße aus Köln — café naïve ďábel, 你好世界 こんにちは 삼겹살 привет мир 👩‍👩‍👧 done.",
] * 3

#: Split pattern of Qwen 2 and 3.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _special(*names: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False, **flags) for name in names]


def _train_bytes(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    """SmolLM2's kind: digits apart, GPT-2's split."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return _train_bytes(pre_tokenizers.Sequence(steps))


@functools.cache
def qwen() -> Tokenizer:
    """Qwen's kind: NFC, its own split, an added token that is not special."""
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    tokenizer = _train_bytes(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("<a b>", normalized=True)])
    return tokenizer


@functools.cache
def qwen_cuttable() -> Tokenizer:
    """Qwen's kind with added tokens of one word only."""
    config = json.loads(qwen().to_str())
    config["added_tokens"] = [t for t in config["added_tokens"] if " " not in t["content"]]
    tokenizer = Tokenizer.from_str(json.dumps(config))
    tokenizer.add_tokens([AddedToken("<inner>", normalized=True)])
    return tokenizer


@functools.cache
def roberta() -> Tokenizer:
    """RoBERTa's kind: a space before each stretch, a <mask> that eats white space to its left, whole words only."""
    tokenizer = _train_bytes(pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.add_special_tokens(_special("<mask>", lstrip=True))
    tokenizer.add_tokens([AddedToken("fox", single_word=True, normalized=False)])
    start, end = SPECIAL[1], SPECIAL[2]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 1), (end, 2)]
    )
    return tokenizer


def _with_bytes(*, prepend: bool) -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prepend else "never")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for name in ("\u2581\u2581", "\u2581\u2581\u2581"):
        vocab.setdefault(name, len(vocab))
    merges = [*map(tuple, model["merges"]), ("\u2581", "\u2581")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    swap = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), swap] if prepend else [swap])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prepend else steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@functools.cache
def llama2() -> Tokenizer:
    """SentencePiece BPE with byte fallback; a leading space is put before each stretch, and taken off when decoding."""
    return _with_bytes(prepend=True)


@functools.cache
def gemma() -> Tokenizer:
    """The same without the leading space."""
    return _with_bytes(prepend=False)


@functools.cache
def phi() -> Tokenizer:
    """Llama 2's kind with special tokens that eat white space to their right."""
    tokenizer = _with_bytes(prepend=True)
    tokenizer.add_special_tokens(_special("<|user|>", "<|end|>", rstrip=True))
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Unigram with a leading space at the start of a text only: what a stretch gives depends on its place."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def word_level() -> Tokenizer:
    """A plain vocabulary; decode() joins words with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    """BERT's kind; its decoder is no table."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


ALL: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "qwen": qwen,
    "roberta": roberta,
    "llama2": llama2,
    "gemma": gemma,
    "phi": phi,
    "metaspace": metaspace,
    "word_level": word_level,
    "word_piece": word_piece,
}

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def token_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None, name
    return found


def save(tokenizer: Tokenizer, path: Path, template: str | None = TEMPLATE, **config: object) -> Path:
    """A model directory without a model."""
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"vocab_size": 600, "eos_token_id": 2, "model_type": "llama"}))
    return path
