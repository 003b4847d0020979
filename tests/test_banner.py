"""The banner: its first line is for programs, its curl line for pasting."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess

import pytest

from evap import banner
from evap.banner import Ready


def ready(**changes: object) -> Ready:
    facts = {
        "host": "127.0.0.1",
        "port": 8123,
        "model": "tiny",
        "engine": "synthetic",
        "device": "cpu",
        "started_s": 0.24,
    }
    return Ready(**{**facts, **changes})  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_the_first_line_is_stable() -> None:
    assert re.fullmatch(r"evap \S+ ready at http://127\.0\.0\.1:8123 in 0\.2 s", banner.plain(ready()).splitlines()[0])


def test_it_says_model_engine_device_and_context() -> None:
    text = banner.plain(ready(max_model_len=8192, dtype="float32"))
    assert "tiny, context 8,192 tokens" in text
    assert "synthetic on cpu, float32" in text
    assert "synthetic, without a model" in banner.plain(ready(device="none", dtype="none"))


@pytest.mark.parametrize(
    ("changes", "url", "flag"),
    [
        ({}, "http://127.0.0.1:8123", "--http2-prior-knowledge"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8123", "--http2-prior-knowledge"),
        ({"host": "::"}, "http://[::1]:8123", "--http2-prior-knowledge"),
        ({"tls": "self-signed"}, "https://127.0.0.1:8123", "-k"),
    ],
)
def test_the_curl_line_is_one_shell_word_list(changes: dict[str, object], url: str, flag: str) -> None:
    words = shlex.split(banner.curl(ready(**changes)))
    assert words[:2] == ["curl", "-sN"]
    assert flag in words
    assert url + "/v1/chat/completions" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["stream"] is True
    assert body["messages"][0]["content"] == banner.QUESTION


def test_where_keys_are_needed_the_shell_has_one() -> None:
    """As it is pasted: a shell puts the key in."""
    assert "$KEY" not in banner.plain(ready())
    assert "python -m evap keys create" in banner.plain(ready(keys=True))
    pasted = banner.curl(ready(keys=True)).replace("curl", "printf '%s\\n'", 1)
    done = subprocess.run(pasted, shell=True, env={"KEY": "sk-evap-x"}, capture_output=True, text=True, check=True)
    assert "authorization: Bearer sk-evap-x" in done.stdout.splitlines()


def test_a_model_without_chat_gets_a_prompt() -> None:
    words = shlex.split(banner.curl(ready(chat=False, tls="certificate")))
    assert "https://127.0.0.1:8123/v1/completions" in words
    assert "-k" not in words
    assert "prompt" in json.loads(words[-1])


def test_an_open_address_is_pointed_out() -> None:
    assert "every network" in banner.plain(ready(host="0.0.0.0"))
    assert "every network" not in banner.plain(ready())


def test_a_terminal_gets_the_same_words_unwrapped() -> None:
    terminal = Terminal()
    banner.show(ready(), terminal)
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == banner.plain(ready())


def test_json_is_one_line() -> None:
    out = io.StringIO()
    banner.show(ready(), out, format="json")
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["url"] == "http://127.0.0.1:8123"


def test_nobody_to_read_it_is_no_error() -> None:
    banner.show(ready(), Gone())
