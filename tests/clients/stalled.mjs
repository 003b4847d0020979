// Ten streams on one connection; one is not read until the other nine have ended.
import http2 from "node:http2";

const [url, tokens] = [process.argv[2], Number(process.argv[3])];
const session = http2.connect(url);
const said = (word) => `${word} `.repeat(Math.ceil(tokens / (word.length + 1))).slice(0, tokens);

function ask(word) {
  const stream = session.request({ ":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json" });
  const messages = [{ role: "user", content: `canary:${word} please` }];
  stream.end(JSON.stringify({ messages, max_tokens: tokens, stream: true }));
  return stream;
}

async function text(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  const events = Buffer.concat(parts).toString().split("\n\n").filter((e) => e.startsWith("data: ")).map((e) => e.slice(6));
  if (events.pop() !== "[DONE]") return "incomplete";
  return events.map((e) => JSON.parse(e).choices[0].delta.content ?? "").join("");
}

const stalled = ask("stalled"); // nobody listens to its data: its window is not opened again
const words = Array.from({ length: 9 }, (_, n) => `reader${n}`);
const texts = await Promise.all(words.map((word) => text(ask(word))));
const stalledHadEnded = stalled.readableEnded || stalled.closed;
const readers = texts.map((t, n) => t === said(words[n]));
console.log(JSON.stringify({ readers, stalledHadEnded, stalled: await text(stalled) }));
session.close();
