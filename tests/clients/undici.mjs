// STREAMS chats at once over undici's HTTP/2 (allowH2), on one connection; undici is the one inside node.
// Says "running" once each has a first event. A line on stdin: one more request over the same agent, while those run.
// When all have ended: a request again and again until one is answered. Then {version, ok, wrong, late, moved} on one line.
import { once } from "node:events";
import { createInterface } from "node:readline";
import { judge, body, path } from "./canaries.mjs";

const [url] = process.argv.slice(2);
const [streams, tokens] = process.argv.slice(3).map(Number);
const headers = { "content-type": "application/json" };

await fetch("data:,"); // sets the global dispatcher, whose class is otherwise out of reach
const { constructor: Agent } = globalThis[Symbol.for("undici.globalDispatcher.1")];
const settings = { allowH2: true, connections: 1, pipelining: 100, connect: { rejectUnauthorized: false } };
const dispatcher = new Agent(settings);

async function ask(word, begun = () => {}) {
  const answer = await fetch(url + path, { method: "POST", headers, body: body(word, tokens), dispatcher });
  const parts = [];
  for await (const part of answer.body) parts.push(part) === 1 && begun();
  return answer.status === 200 ? judge(word, Buffer.concat(parts).toString(), tokens) : `${word}: ${answer.status}`;
}

const failed = (word) => (error) => `${word}: ${error.cause?.code ?? error.cause ?? error}`;

let waiting = streams;
const begun = () => --waiting || console.log("running");
const words = Array.from({ length: streams }, (_, n) => `s${n}`);
const all = Promise.all(words.map((word) => ask(word, begun).catch(failed(word))));
let ended = false;
all.then(() => (ended = true));

const lines = createInterface({ input: process.stdin });
await once(lines, "line");
const late = { said: await ask("late").catch(failed("late")), running: !ended };
const wrong = (await all).filter((answer) => answer !== null);
console.log("ended");

await once(lines, "line");
let moved = "never asked";
for (let n = 0; n < 200 && moved !== null; n++) {
  moved = await ask("moved").catch(failed("moved"));
  if (moved !== null) await new Promise((resolve) => setTimeout(resolve, 50));
}
console.log(JSON.stringify({ version: process.versions.undici, ok: streams - wrong.length, wrong: wrong.slice(0, 5), late, moved }));
process.exit(0);
