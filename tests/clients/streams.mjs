// node:http2 against the server: CONNECTIONS x STREAMS chats at once, each with its own canary.
// Prints {ok, wrong: [...]}; a wrong text names what came instead.
import http2 from "node:http2";

const [url, connections, streams, tokens] = [process.argv[2], ...process.argv.slice(3).map(Number)];

function said(word) {
  return `${word} `.repeat(Math.ceil(tokens / (word.length + 1))).slice(0, tokens);
}

function ask(session, word) {
  return new Promise((resolve) => {
    const stream = session.request({ ":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json" });
    const parts = [];
    let status = 0;
    stream.on("response", (headers) => (status = headers[":status"]));
    stream.on("data", (part) => parts.push(part));
    stream.on("error", (error) => resolve(`${word}: ${error.code}`));
    stream.on("end", () => {
      const events = Buffer.concat(parts).toString().split("\n\n").filter((e) => e.startsWith("data: ")).map((e) => e.slice(6));
      const complete = status === 200 && events.pop() === "[DONE]";
      const text = complete ? events.map((e) => JSON.parse(e).choices[0].delta.content ?? "").join("") : `status ${status}`;
      resolve(text === said(word) ? null : `${word}: ${text.slice(0, 80)}`);
    });
    const message = { role: "user", content: `canary:${word} please` };
    stream.end(JSON.stringify({ messages: [message], max_tokens: tokens, stream: true }));
  });
}

const sessions = Array.from({ length: connections }, () => http2.connect(url));
const asked = sessions.flatMap((session, c) => Array.from({ length: streams }, (_, s) => ask(session, `c${c}s${s}`)));
const answers = await Promise.all(asked);
for (const session of sessions) session.close();
const wrong = answers.filter((answer) => answer !== null);
console.log(JSON.stringify({ ok: answers.length - wrong.length, wrong: wrong.slice(0, 5) }));
