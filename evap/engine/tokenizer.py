"""A model directory's tokenizer with its chat template: `load_text` makes the `Text` of interface.py."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from evap.engine.chat_template import ChatTemplate, load_chat_template, read_json, special_token_names
from evap.engine.detokenizer import TextStream, detokenizer
from evap.engine.fragments import build_fragments
from evap.engine.interface import Detokenizer, Fragments
from evap.engine.token_cache import TokenCache
from evap.engine.vocabulary import Vocabulary, load_vocabulary
from evap.errors import ContextOverflow, StartupError

_log: Final = logging.getLogger(__name__)
_PROBES: Final = ("a", "x y", "")


def load_text(
    path: Path, *, cache_mb: int = 64, now: Callable[[], datetime.datetime] = datetime.datetime.now
) -> HfText:
    """The tokenizer of a directory in Hugging Face form. cache_mb: memory for ids of texts seen before (0: none);
    now: local time, for templates that print a date.

    Takes well under a second for 150,000 tokens. Raises StartupError when a file is missing or broken.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"{path} has no tokenizer.json", remedy="save the tokenizer in its fast form")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # tokenizers raises Exception itself, nothing narrower
        raise StartupError(f"cannot read {file}: {str(e)[:200]}", remedy="fetch the model again") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(path / "config.json")
    vocabulary = load_vocabulary(tokenizer, _vocab_size(config))
    text = HfText(
        tokenizer,
        vocabulary,
        load_chat_template(path, now),
        TokenCache(tokenizer, cache_mb << 20),
        eos_ids=eos_ids(path, tokenizer),
    )
    for what, why in (("fragment table", text.fragments_off), ("token cache", text.token_cache.why_off)):
        if why:
            _log.warning("no %s for this model: %s; it works, but costs more CPU", what, why)
    return text


class HfText:
    """`Text` (see interface) on the tokenizers library.

    limit_tokens: when set, prompts with more tokens are refused (ContextOverflow) before they are tokenized to their
    end, often before they are looked at. fragments_off: why `fragments` is None, or "". has_template: chats work.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        cache: TokenCache,
        *,
        eos_ids: frozenset[int],
    ) -> None:
        self.vocab_size = vocabulary.size
        self.eos_ids = eos_ids
        self.limit_tokens = 0
        self.has_template = template.usable
        self.token_cache = cache
        self.vocabulary = vocabulary
        self.fragments: Fragments | None
        self.fragments, self.fragments_off = build_fragments(tokenizer, vocabulary)
        self._tokenizer = tokenizer
        self._template = template
        self._around = _around(tokenizer)
        self._longest_token = max((len(n or "") for n in vocabulary.names), default=1)
        self._bytes_kept = tokenizer.normalizer is None and _is_byte_level(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt with the tokenizer's BOS or EOS, if it adds any; a BOS that the text begins with is not
        doubled. Raises InvalidRequest (lone surrogates), ContextOverflow."""
        self._refuse_overlong([text], "prompt")
        if self._around is None:
            return list(self._tokenizer.encode_batch_fast([text])[0].ids)
        before, after = self._around
        ids = self.token_cache.ids(text, self.limit_tokens)
        if before and ids[: len(before)] == before:
            before = []
        return [*before, *ids, *after] if before or after else ids

    def chat_ids(self, messages: Sequence[object], template_args: dict[str, object]) -> list[int]:
        """Ids of the rendered conversation; the template writes BOS itself. Raises InvalidRequest, ContextOverflow."""
        # before rendering too: a template copies its text several times without letting other threads run
        self._refuse_overlong(messages, "messages")
        text = self._template.render(messages, template_args)
        self._refuse_overlong([text], "messages")
        return self.token_cache.ids(text, self.limit_tokens, "messages")

    def _refuse_overlong(self, texts: Sequence[object], param: str) -> None:
        """A text has at least length / longest token tokens, where tokens are the text's own bytes. A message counts
        with its content; a template that leaves most of such a content out is not waited for."""
        if not self.limit_tokens:
            return
        least = sum(map(self._surely, texts)) // self._longest_token
        if least > self.limit_tokens:
            raise ContextOverflow(
                f"the prompt has more than {least} tokens; the model's context has room for {self.limit_tokens}",
                param=param,
            )

    def _surely(self, text: object) -> int:
        """Characters that each come out of some token."""
        content = text.get("content") if isinstance(text, Mapping) else text
        return len(content) if isinstance(content, str) and (self._bytes_kept or content.isascii()) else 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text; special tokens give their name, ids without a token nothing."""
        if self.vocabulary.pieces is not None:
            return self.vocabulary.pieces.rest_shown[token_id]
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(
        self,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> Detokenizer:
        stream: TextStream = detokenizer(
            self._tokenizer,
            self.vocabulary,
            stop=stop,
            include_stop=include_stop,
            skip_special=skip_special,
            prompt_ids=prompt_ids,
        )
        return stream


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return tokenizer.decoder is not None and b'"type":"ByteLevel"' in tokenizer.decoder.__getstate__()


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """What the post-processor puts before and after a text; None when it does more than that."""
    found: tuple[list[int], list[int]] | None = None
    for probe in _PROBES:
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        whole = tokenizer.encode(probe, add_special_tokens=True).ids
        extra = len(whole) - len(bare)
        at = next((i for i in range(extra + 1) if whole[i : i + len(bare)] == bare), None)
        if at is None:
            return None
        here = (whole[:at], whole[at + len(bare) :])
        if bare:
            if found not in (None, here):
                return None
            found = here
        elif found is not None and here[0] + here[1] != found[0] + found[1]:
            return None
    return found


def _vocab_size(config: dict[str, Any]) -> int:
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return 0


def eos_ids(path: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a generation: of generation_config.json, config.json, and the tokenizer's own eos_token."""
    config = read_json(path / "config.json")
    found: set[int] = set()
    for part in (read_json(path / "generation_config.json"), config, config.get("text_config")):
        value = part.get("eos_token_id") if isinstance(part, dict) else None
        found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    name = special_token_names(path).get("eos_token")
    own = tokenizer.token_to_id(name) if name is not None else None
    return frozenset(found if own is None else found | {own})
