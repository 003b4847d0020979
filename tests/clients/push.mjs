// node:http2 and pushes: push.mjs URL MODE, where MODE is
//   take     every block is read
//   cancel   block 1 is closed with CANCEL at its first octet; block 0 is then fetched again by its path
//   silent   nobody listens for pushes: node throws them away
//   off      push is switched off in SETTINGS
//   last     as take, without a second request
// Prints {push, main, blocks, fetched, second}: the header, the main body, bodies by path, and a second request's status.
import http2 from "node:http2";

const [url, mode, body] = process.argv.slice(2);
const session = http2.connect(url, { settings: mode === "off" ? { enablePush: false } : {} });
const result = { push: null, main: "", blocks: {}, fetched: null, second: null };
const pending = [];

function read(stream) {
  return new Promise((resolve, reject) => {
    let text = "";
    stream.setEncoding("utf8");
    stream.on("data", (part) => (text += part));
    stream.on("close", () => resolve(text));
    stream.on("error", reject);
  });
}

function ask(fields) {
  return session.request({ ":path": "/v1/chat/completions", "evap-push": "blocks", ...fields });
}

if (mode !== "silent") {
  session.on("stream", (pushed, head) => {
    const path = head[":path"];
    if (mode === "cancel" && path.endsWith("/1")) pushed.once("data", () => pushed.close(http2.constants.NGHTTP2_CANCEL));
    pending.push(read(pushed).then((text) => (result.blocks[path] = text)));
  });
}

const main = ask({ ":method": "POST", "content-type": "application/json" });
main.on("response", (head) => (result.push = head["evap-push"] ?? null));
main.end(body);
result.main = await read(main);
while (pending.length) await pending.shift();
if (mode === "cancel") {
  const path = Object.keys(result.blocks).find((name) => name.endsWith("/0"));
  result.fetched = await read(session.request({ ":path": path }));
}
if (mode !== "last") {
  const second = session.request({ ":path": "/health" });
  second.on("response", (head) => (result.second = head[":status"]));
  await read(second);
}
session.close();
console.log(JSON.stringify(result));
