// STREAMS chats at once over node's fetch (undici, HTTP/1.1) or node:http2, as argv says: fetch|http2.
// Says "running" once each has a first event, and at the end {ok, wrong: [...]} on one line.
import http2 from "node:http2";
import { body, judge, path } from "./canaries.mjs";

const [url, kind] = process.argv.slice(2);
const [streams, tokens] = process.argv.slice(4).map(Number);
const headers = { "content-type": "application/json" };

async function byFetch(word, begun) {
  const answer = await fetch(url + path, { method: "POST", headers, body: body(word, tokens) });
  const parts = [];
  for await (const part of answer.body) parts.push(part) === 1 && begun();
  return judge(word, Buffer.concat(parts).toString(), tokens);
}

const session = kind === "http2" ? http2.connect(url) : null;

function byHttp2(word, begun) {
  return new Promise((resolve, reject) => {
    const stream = session.request({ ":method": "POST", ":path": path, ...headers });
    const parts = [];
    stream.on("data", (part) => parts.push(part) === 1 && begun());
    stream.on("error", reject);
    stream.on("end", () => resolve(judge(word, Buffer.concat(parts).toString(), tokens)));
    stream.end(body(word, tokens));
  });
}

let waiting = streams;
const begun = () => --waiting || console.log("running");
const ask = kind === "http2" ? byHttp2 : byFetch;
const words = Array.from({ length: streams }, (_, n) => `s${n}`);
const answers = await Promise.all(words.map((word) => ask(word, begun).catch((error) => `${word}: ${error}`)));
const wrong = answers.filter((answer) => answer !== null);
console.log(JSON.stringify({ ok: answers.length - wrong.length, wrong: wrong.slice(0, 5) }));
session?.close();
