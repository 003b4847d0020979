// An upload that is refused before it is complete, over HTTP/2 and over HTTP/1.1: status and error code of each.
import http from "node:http";
import http2 from "node:http2";
import { Readable } from "node:stream";

const [url, path, size] = [process.argv[2], process.argv[3], Number(process.argv[4])];
const piece = Buffer.alloc(1 << 16, "x");

function upload(stream) {
  return new Promise((resolve, reject) => {
    const answer = { status: 0, text: "" };
    const collect = (from) => from.on("data", (part) => (answer.text += part)).on("end", () => resolve(answer));
    stream.on("error", reject);
    stream.on("response", (head) => {
      answer.status = head[":status"] ?? head.statusCode;
      collect(head[":status"] ? stream : head);
    });
    Readable.from(Array(size / piece.length).fill(piece)).pipe(stream);
  });
}

const session = http2.connect(url);
const two = await upload(
  session.request({ ":method": "POST", ":path": path, "content-type": "application/json", "content-length": size }),
);
session.close();
const one = await upload(http.request(url + path, { method: "POST", headers: { "content-type": "application/json" } }));
console.log(JSON.stringify([two, one].map(({ status, text }) => [status, JSON.parse(text).error.code])));
