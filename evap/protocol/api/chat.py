"""`POST /v1/chat/completions`: OpenAI's chat dialect, with vLLM's sampling extras.

What the chat template is given: messages with string contents (text parts joined by a newline, as vLLM does), tools,
and chat_template_kwargs. Tool calls in an answer come as the text the model wrote: they are not parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from evap.errors import InvalidRequest, echo
from evap.messages import LogprobText, ParsedRequest
from evap.protocol.api import fields, render
from evap.protocol.api.body import ABSENT, decode, decode_small, is_set, unsupported
from evap.protocol.api.dialect import Renderer

MAX_MESSAGES: Final = 65_536
MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 1 << 20
MAX_TEMPLATE_ARGS_BYTES: Final = 64 << 10
MAX_ARGUMENTS_BYTES: Final = 1 << 20

#: Role -> what the template is told. OpenAI's newer name for the system role is unknown to most templates.
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS: Final = frozenset(("text", "input_text", "output_text"))
#: chat_template_kwargs may not replace what evap itself gives the template, or the template.
RESERVED_ARGS: Final = frozenset(("messages", "tools", "chat_template", "tokenize", "add_generation_prompt"))


class ContentPart(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: None = None
    audio: None = None


class ChatBody(fields.CommonFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: fields.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template: None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    web_search_options: None = None


_BODY: Final = msgspec.json.Decoder(ChatBody)
_TOOLS: Final = msgspec.json.Decoder(Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)])
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


class Chat:
    """The chat dialect. `structured_output`: the engine has vLLM's own fields, and grammars."""

    def __init__(self, *, structured_output: bool = False) -> None:
        self._structured_output = structured_output

    def parse(self, body: bytes, *, max_choices: int = 128) -> ParsedRequest:
        """Raises InvalidRequest (with param) for anything that is not a valid request."""
        request = decode(body, _BODY)
        fields.check_common(request, max_choices)
        _check(request)
        extra = fields.extras(request, supported=self._structured_output)
        include_usage, continuous_usage = fields.usage_options(request)
        limit = request.max_completion_tokens
        return ParsedRequest(
            model=request.model,
            messages=[_message(m, i) for i, m in enumerate(request.messages)],
            template_args=_template_args(request),
            sampling=fields.sampling(request, _logprobs_asked(request), extra),
            left_open=fields.left_open(request),
            max_tokens=limit if limit is not None else request.max_tokens,
            n=request.n or 1,
            priority=request.priority,
            stop=fields.stops(request.stop),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            stream=bool(request.stream),
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            user=request.user,
        )

    def renderer(
        self, request: ParsedRequest, *, id_suffix: str, model: str, created_s: int, kind: str = "sse"
    ) -> Renderer:
        """Raises InvalidRequest or NotAcceptable if the answer cannot be of that kind."""
        return render.renderer_for(
            SHAPE, request, id_suffix=id_suffix, model=model, created_s=created_s, kind=kind
        )  # fmt: skip


def _check(request: ChatBody) -> None:
    if request.modalities not in (None, ["text"]):
        raise unsupported("modalities")
    if request.add_generation_prompt is False:
        raise unsupported("add_generation_prompt")
    if request.continue_final_message:
        raise unsupported("continue_final_message")
    if request.echo:
        raise unsupported("echo")
    if is_set(request.tool_choice) and bytes(request.tool_choice) not in (b'"none"', b'"auto"'):
        raise InvalidRequest(
            "tool_choice must be 'none' or 'auto': this engine cannot be made to call a tool",
            param="tool_choice", code="unsupported_parameter",
        )  # fmt: skip


def _logprobs_asked(request: ChatBody) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _template_args(request: ChatBody) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if is_set(request.chat_template_kwargs):
        param = "chat_template_kwargs"
        args = decode_small(request.chat_template_kwargs, _OBJECT, param, MAX_TEMPLATE_ARGS_BYTES)
        reserved = RESERVED_ARGS.intersection(args)
        if reserved:
            raise InvalidRequest(f"{param} may not set {min(reserved)}", param=f"{param}.{min(reserved)}")
    if is_set(request.tools):
        tools = decode_small(request.tools, _TOOLS, "tools", MAX_TOOLS_BYTES)
        for i, tool in enumerate(tools):
            _check_tool(tool, f"tools[{i}]")
        if tools and bytes(request.tool_choice) != b'"none"':
            args["tools"] = tools
    return args


def _check_tool(tool: dict[str, Any], param: str) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{param} must be {{'type': 'function', 'function': ...}}", param=param)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{param}.function.name must be a string", param=f"{param}.function.name")


def _message(message: Message, i: int) -> dict[str, Any]:
    """A message as chat templates know it. Absent members stay absent."""
    role = ROLES.get(message.role)
    if role is None:
        allowed = ", ".join(ROLES)
        raise InvalidRequest(
            f"messages[{i}].role must be one of {allowed}, not '{echo(message.role)}'", param=f"messages[{i}].role"
        )
    content = message.content
    if not isinstance(content, str):
        content = _null_content(message, i) if content is None else _joined(content, i)
    result: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_calls:
        where = f"messages[{i}].tool_calls"
        result["tool_calls"] = [_tool_call(c, f"{where}[{k}]") for k, c in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    return result


def _null_content(message: Message, i: int) -> str:
    if message.role == "assistant" and message.tool_calls:
        return ""
    raise InvalidRequest(
        f"messages[{i}].content is required; it may be null only in an assistant's message with tool_calls",
        param=f"messages[{i}].content", code="missing_required_parameter",
    )  # fmt: skip


def _joined(parts: list[ContentPart], i: int) -> str:
    texts = []
    for k, part in enumerate(parts):
        param = f"messages[{i}].content[{k}]"
        if part.type not in TEXT_PARTS:
            raise InvalidRequest(
                f"{param} is of type '{echo(part.type)}': this model takes text only", param=f"{param}.type"
            )
        if part.text is None:
            raise InvalidRequest(f"{param}.text is required", param=f"{param}.text", code="missing_required_parameter")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, param: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates expect (OpenAI sends them as JSON text)."""
    if call.type not in (None, "function"):
        raise InvalidRequest(f"{param}.type must be 'function'", param=f"{param}.type")
    where = f"{param}.function.arguments"
    text = msgspec.Raw((call.function.arguments or "{}").encode())
    arguments = decode_small(text, _OBJECT, where, MAX_ARGUMENTS_BYTES)
    result: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        result["id"] = call.id
    return result


# Rendering


def _logprobs(entries: Sequence[LogprobText], k: int, offset: int) -> dict[str, Any]:
    """OpenAI's chat shape: one object a token, with its exact bytes."""
    content = [
        {
            **_token(entry.text, entry.logprob, entry.data),
            "top_logprobs": [_token(text, logprob, data) for text, logprob, data in entry.top[:k]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": render.number(logprob), "bytes": list(data)}


def _choice(text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}


SHAPE: Final = render.Shape(
    id_prefix="chatcmpl-",
    chunk_object="chat.completion.chunk",
    whole_object="chat.completion",
    open=b'"delta":{"content":',
    close=b"}",
    plain=b',"finish_reason":null',
    prelude=b'"delta":{"role":"assistant","content":""},"finish_reason":null',
    empty=b'"delta":{},',
    logprobs=_logprobs,
    choice=_choice,
)
