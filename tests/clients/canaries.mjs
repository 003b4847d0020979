// What the scripts of this folder ask for, and whether the answer is whole (asking.py has the same in Python).
export const path = "/v1/chat/completions";

export const said = (word, tokens) => `${word} `.repeat(Math.ceil(tokens / (word.length + 1))).slice(0, tokens);

export const body = (word, tokens) =>
  JSON.stringify({ messages: [{ role: "user", content: `canary:${word} please` }], max_tokens: tokens, stream: true });

// null, or what is wrong with the events of a stream
export function judge(word, text, tokens) {
  const events = text.split("\n\n").filter((e) => e.startsWith("data: ")).map((e) => e.slice(6));
  if (events.pop() !== "[DONE]") return `${word}: cut short`;
  const found = events.map((e) => JSON.parse(e).choices[0].delta.content ?? "").join("");
  return found === said(word, tokens) ? null : `${word}: ${found.slice(0, 80)}`;
}
