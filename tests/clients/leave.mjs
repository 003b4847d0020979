// Ten streams on one connection to a silent engine. One line of input each: "reset N" gives stream N up (RST_STREAM),
// "end" waits for the others and prints what they said. Every step answers with one line.
import http2 from "node:http2";
import readline from "node:readline";

const [url, tokens] = [process.argv[2], Number(process.argv[3])];
const session = http2.connect(url);
let heads = 0;
const streams = Array.from({ length: 10 }, (_, n) => {
  const stream = session.request({ ":method": "POST", ":path": "/v1/completions", "content-type": "application/json" });
  const one = { stream, text: "", ended: null };
  stream.on("response", () => ++heads === 10 && console.log("open"));
  one.ended = new Promise((resolve) => stream.on("close", () => resolve(stream.rstCode)));
  stream.on("error", () => {});
  stream.on("data", (part) => (one.text += part));
  stream.end(JSON.stringify({ prompt: `canary:stream${n}`, max_tokens: tokens, stream: true }));
  return one;
});
for await (const line of readline.createInterface({ input: process.stdin })) {
  const [word, n] = line.split(" ");
  if (word === "reset") {
    streams[n].stream.close(http2.constants.NGHTTP2_CANCEL);
    console.log("reset");
  } else if (word === "end") {
    const codes = await Promise.all(streams.map((one) => one.ended));
    console.log(JSON.stringify({ codes, texts: streams.map((one) => one.text) }));
    session.close();
  }
}
