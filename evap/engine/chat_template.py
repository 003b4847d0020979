"""A model's chat template: messages -> text, as transformers' apply_chat_template renders it.

Differences on purpose, both as vLLM does: a tool call's `arguments` that is a JSON string reaches the template as the
object it encodes, and a content made of text parts is joined with newlines when the template expects a string.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import msgspec
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evap.errors import InvalidRequest, StartupError, echo

Now = Callable[[], datetime.datetime]

#: Far above any context; a template that writes more is broken.
MAX_RENDERED_CHARS: Final = 256 << 20
_ROLES_OF_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Names a message's reasoning comes under; templates read the first, gpt-oss the second (as transformers 5 does).
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
#: What a template can raise on input it did not expect.
_REFUSALS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_OF_DICTS: Final = frozenset(dir(dict))
#: Numbers and items that a template's `loop` tells; all safe to read.
_OF_LOOPS: Final = frozenset(
    {"first", "last", "index", "index0", "revindex", "revindex0", "length", "depth", "depth0", "previtem", "nextitem"}
)
_CONTINUE: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes (jinja2's own filter escapes them)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with its answers for `message.role` and `loop.first` given at once: two thirds of a rendering go
    into asking whether those are safe. Plain dicts have no attributes but a dict's own, which take the long way."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment(now: Now) -> ImmutableSandboxedEnvironment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: now().strftime(form)
    return env


class ChatTemplate:
    """Compiled template(s) of one model. Thread-safe.

    sources: name -> Jinja text; "default" is used, and "tool_use" (if there is one) for requests with tools.
    tokens: bos_token and the like, as template variables. Raises StartupError for a template that does not compile.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str], now: Now = datetime.datetime.now) -> None:
        env = _environment(now)
        self._sources = dict(sources)
        self._tokens = dict(tokens)
        try:
            self._templates = {name: env.from_string(source) for name, source in sources.items()}
            self._wants_parts = {name: _iterates_content(env.parse(source)) for name, source in sources.items()}
        except jinja2.TemplateError as e:
            raise StartupError(
                f"the model's chat template is not valid Jinja: {e}", remedy="fix chat_template in the model directory"
            ) from e

    @property
    def usable(self) -> bool:
        """Whether there is a template at all; base models have none."""
        return "default" in self._templates

    def render(self, messages: Sequence[object], args: Mapping[str, Any]) -> str:
        """The prompt. args: tools, documents, add_generation_prompt (default True), continue_final_message, and
        whatever else the template reads. Raises InvalidRequest when the template refuses the messages."""
        name = "tool_use" if args.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "this model has no chat template; send a prompt to /v1/completions instead", param="messages"
            )
        if not messages:
            raise InvalidRequest("messages is empty", param="messages")
        if "chat_template" in args or "messages" in args:
            raise InvalidRequest("the chat template cannot be changed by a request", param="chat_template")
        variables: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens}
        variables.update(args)
        goes_on = bool(variables.pop("continue_final_message", False))
        if goes_on:
            variables["add_generation_prompt"] = False
        try:
            chat = [_plain(m, self._wants_parts[name]) for m in messages]
            if goes_on:
                chat[-1] = _tagged(chat[-1])
            variables["messages"] = chat
            return _cut_at_tag(self._run(name, variables), goes_on)
        except InvalidRequest:
            raise
        except _REFUSALS as e:
            raise InvalidRequest(
                f"the chat template refuses these messages: {self._said(name, e)}", param="messages"
            ) from e

    def _run(self, name: str, variables: dict[str, Any]) -> str:
        template = self._templates[name]
        pieces: list[str] = []
        size = 0
        # what Template.render does, with a count
        for piece in template.root_render_func(template.new_context(variables)):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise InvalidRequest("the rendered prompt is too long", param="messages")
            pieces.append(piece)
        return "".join(pieces)

    def _said(self, name: str, error: Exception) -> str:
        """The error's words: in full when they stand in the template, else shortened, as they may repeat input."""
        message = str(error)
        return message[:400] if message and message in self._sources[name] else echo(message)


def _plain(message: object, wants_parts: bool) -> Mapping[str, Any]:
    """A message as templates expect it: a dict without None, arguments of tool calls decoded, text parts joined."""
    if not isinstance(message, Mapping):
        raise InvalidRequest("each message must be an object", param="messages")
    content = message.get("content")
    if type(content) is str and len(message) == 2 and None not in message.values():
        return message  # the usual case; the sandbox lets no template change it
    plain = {k: v for k, v in message.items() if v is not None}
    if isinstance(content, list) and not wants_parts:
        plain["content"] = _joined(content)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_decoded_call(c) for c in plain["tool_calls"]]
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _joined(parts: Iterable[Any]) -> str:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest("this model reads text content only", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _decoded_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError as e:
        raise InvalidRequest("a tool call's arguments are not valid JSON", param="messages") from e
    return {**call, "function": {**function, "arguments": arguments}}


def _tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a mark at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE}
    parts = list(content) if isinstance(content, list) else []
    for i in reversed(range(len(parts))):
        if isinstance(parts[i], Mapping) and isinstance(parts[i].get("text"), str):
            parts[i] = {**parts[i], "text": parts[i]["text"] + _CONTINUE}
            return {**message, "content": parts}
    raise InvalidRequest("the final message has no text to continue", param="continue_final_message")


def _cut_at_tag(rendered: str, goes_on: bool) -> str:
    if not goes_on:
        return rendered
    at = rendered.rfind(_CONTINUE.strip())
    if at < 0:
        raise InvalidRequest(
            "the chat template drops the final message, so it cannot be continued", param="continue_final_message"
        )
    kept = rendered[:at]
    # a template that strips its content took the tag's own space with it, and the text's too
    return kept if rendered.startswith(_CONTINUE, at) else kept.rstrip()


def _reads_content(node: nodes.Node) -> bool:
    """Whether an expression is `x.content` or `x['content']`, or contains one."""
    if isinstance(node, nodes.Getattr) and node.attr == "content":
        return True
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
        return True
    return any(_reads_content(child) for child in node.iter_child_nodes())


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, so that it takes a list of parts."""
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _reads_content(assign.node):
            aliases.add(assign.target.name)
    for loop in tree.find_all(nodes.For):
        over = loop.iter.node if isinstance(loop.iter, nodes.Filter) and loop.iter.node is not None else loop.iter
        if isinstance(over, nodes.Name) and over.name in aliases:
            return True
        if isinstance(over, (nodes.Getattr, nodes.Getitem)) and _reads_content(over):
            return True
    return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is none. Raises StartupError when it is something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise StartupError(f"cannot read {path}: {e}", remedy="fetch the model again") from e
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object", remedy="fetch the model again")
    return value


def special_token_names(path: Path) -> dict[str, str]:
    """bos_token, eos_token and the like of a model directory: role -> text."""
    found: dict[str, str] = {}
    for config in (read_json(path / "special_tokens_map.json"), read_json(path / "tokenizer_config.json")):
        for role in _ROLES_OF_TOKENS:
            token = config.get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[role] = token
    return found


def load_chat_template(path: Path, now: Now = datetime.datetime.now) -> ChatTemplate:
    """The template(s) of a model directory; chat_template.jinja wins over the other two files that may hold one."""
    config = read_json(path / "tokenizer_config.json").get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(config, str):
        sources["default"] = config
    elif isinstance(config, list):
        sources = {str(t["name"]): str(t["template"]) for t in config}
    legacy = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        sources["default"] = legacy
    files = {"default": path / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            sources[name] = file.read_text(encoding="utf-8")
    return ChatTemplate(sources, special_token_names(path), now)
