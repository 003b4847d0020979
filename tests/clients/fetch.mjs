// node's own fetch (HTTP/1.1): a streamed and a whole answer, and one that is given up after its first part.
const url = process.argv[2];

function ask(body, signal) {
  const headers = { "content-type": "application/json" };
  return fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(body), signal });
}

const messages = [{ role: "user", content: "canary:fetch please" }];
const streamed = await (await ask({ messages, max_tokens: 30, stream: true })).text();
const whole = await (await ask({ messages, max_tokens: 30 })).json();
const controller = new AbortController();
const left = await ask({ messages, max_tokens: 100000, ignore_eos: true, stream: true }, controller.signal);
await left.body.getReader().read();
controller.abort();
console.log(JSON.stringify({ streamed, whole: whole.choices[0].message.content }));
