// Server push: two answers to one question, each on a stream of its own; the one that is not wanted is stopped alone.
//
//   make serve                        (in one terminal)
//   node examples/push.mjs            (in another; or: node examples/push.mjs http://HOST:PORT)
//
// An API key, if the server wants one, comes from the variable EVAP_API_KEY.
import http2 from "node:http2";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const key = process.env.EVAP_API_KEY;
const body = {
  messages: [{ role: "user", content: "Write a short sentence about the sea." }],
  n: 2,
  max_tokens: 60,
  stream: true,
  stream_options: { include_usage: true },
};

const session = http2.connect(url, { rejectUnauthorized: false }); // for --tls self-signed
const fail = (error) => {
  console.error(`${url}: ${error.message}`);
  process.exit(1);
};
session.on("error", fail);

/** Calls `seen` with each server-sent event of a stream, parsed. */
function events(stream, seen) {
  let rest = "";
  stream.setEncoding("utf8");
  stream.on("data", (text) => {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") seen(JSON.parse(part.slice(6)));
    }
  });
}

let open = 1;
function done() {
  open -= 1;
  if (open === 0) session.close();
}

// One 'stream' event for each block that the server pushes. Its path ends with the block's number: 0 and 1 are the two
// choices, 2 is the usage record.
session.on("stream", (pushed, request) => {
  const block = Number(request[":path"].split("/").pop());
  let text = "";
  open += 1;
  pushed.on("close", () => {
    console.log(`block ${block}: ${pushed.rstCode === http2.constants.NGHTTP2_CANCEL ? "[cancelled] " : ""}${text.trim()}`);
    done();
  });
  events(pushed, (event) => {
    if (event.usage) text = JSON.stringify(event.usage);
    text += event.choices[0]?.delta.content ?? "";
    // Enough of the second choice: its generation stops, the first goes on, and only what was delivered is counted.
    if (block === 1 && text.length > 20) pushed.close(http2.constants.NGHTTP2_CANCEL);
  });
});

const request = session.request({
  ":method": "POST",
  ":path": "/v1/chat/completions",
  "content-type": "application/json",
  "evap-push": "blocks",
  ...(key ? { authorization: `Bearer ${key}` } : {}),
});
request.on("response", (headers) => console.log(`status ${headers[":status"]}, evap-push: ${headers["evap-push"]}`));
request.on("error", fail);
request.on("close", done);
events(request, (event) => {
  if (event.object === "evap.block") console.log(`block ${event.index} comes as ${event.path}`);
  if (event.error) console.log(event.error.message);
});
request.end(JSON.stringify(body));
