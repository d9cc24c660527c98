/** Gateways that are away, broken, old or new, played by a server of Node; no real one is needed. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { test } from "node:test";

import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import {
  CertificateSchema,
  Code,
  ConnectError,
  Degradation,
  RecommendResponseSchema,
  RecordInteractionsRequestSchema,
  connect,
} from "freshet-client";

const ANSWER = toBinary(RecommendResponseSchema, create(RecommendResponseSchema, { items: [{ itemId: "7" }] }));
const answers = (body) => (response) => response.writeHead(200, { "content-type": "application/proto" }).end(body);
const refuses = (status, code, headers = {}) => (response) =>
  response.writeHead(status, { "content-type": "application/json", ...headers }).end(JSON.stringify({ code, message: "m" }));
const unavailable = refuses(503, "unavailable");

/** Runs `use` against a server that plays the script, its last entry again and again. */
async function served(script, use, host = "127.0.0.1", port = 0) {
  const requests = [];
  const server = createServer(async (request, response) => {
    const parts = await request.toArray();
    requests.push({ path: request.url, headers: request.headers, body: Buffer.concat(parts) });
    (script.length > 1 ? script.shift() : script[0])(response);
  });
  server.listen(port, host);
  await once(server, "listening");
  const { address, port: taken } = server.address();
  try {
    const url = `http://${address.includes(":") ? `[${address}]` : address}:${taken}`;
    return await use(connect(url), requests, url);
  } finally {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  }
}

const recommend = (client) => client.recommend({ userId: "ann", k: 3 });
const fails = (code, message) => (error) => {
  assert.ok(error instanceof ConnectError);
  assert.equal(error.code, code);
  assert.match(error.rawMessage, message);
  return true;
};

test("a read that finds no gateway for a moment is repeated, and two times at most", async () => {
  await served([unavailable, unavailable, answers(ANSWER)], async (client, requests) => {
    assert.equal((await recommend(client)).items[0].itemId, "7");
    assert.equal(requests.length, 3);
  });
  await served([unavailable], async (client, requests) => {
    await assert.rejects(recommend(client), fails(Code.Unavailable, /^m$/));
    assert.equal(requests.length, 3);
  });
});

test("a busy gateway's reads are not repeated, its writes are, when it says, as the same event", async () => {
  const busy = refuses(429, "resource_exhausted", { "retry-after-ms": "120" });
  await served([busy], async (client, requests) => {
    await assert.rejects(recommend(client), fails(Code.ResourceExhausted, /^m$/));
    assert.equal(requests.length, 1);
  });
  await served([busy, busy, answers(new Uint8Array())], async (client, requests) => {
    const began = performance.now();
    await client.recordInteractions({ interactions: [{ userId: "ann", itemId: "7" }] });
    assert.ok(performance.now() - began >= 230);
    const ids = requests.map(({ body }) => fromBinary(RecordInteractionsRequestSchema, body).interactions[0].eventId);
    assert.equal(ids.length, 3);
    assert.ok(ids[0].length > 10);
    assert.equal(new Set(ids).size, 1);
  });
});

test("while most calls fail nothing is repeated, and the deadline ends a pause", async () => {
  await served([unavailable], async (client, requests) => {
    for (let call = 0; call < 20; call++) await assert.rejects(recommend(client), fails(Code.Unavailable, /^m$/));
    assert.ok(requests.length < 35, `${requests.length} requests`);
  });
  await served([refuses(503, "unavailable", { "retry-after-ms": "60000" })], async (client) => {
    const late = client.recommend({ userId: "ann", k: 3 }, { timeoutMs: 200 });
    await assert.rejects(late, fails(Code.DeadlineExceeded, /./));
  });
});

test("nothing that listens is unavailable and named, and a gateway that restarts is found", async () => {
  const url = await served([answers(ANSWER)], async (client, _, url) => (await recommend(client), url));
  const client = connect(url);
  await assert.rejects(recommend(client), fails(Code.Unavailable, new RegExp(`^no whole answer from ${url}: .*ECONNREFUSED`)));
  const again = async () => assert.equal((await recommend(client)).items.length, 1);
  await served([answers(ANSWER)], again, "127.0.0.1", Number(new URL(url).port));
});

test("an answer that is cut in the middle is unavailable", async () => {
  const cut = (response) => {
    response.writeHead(200, { "content-type": "application/proto", "content-length": 9_000 });
    response.write(Buffer.alloc(100), () => response.destroy());
  };
  await served([cut], async (client, requests, url) => {
    await assert.rejects(recommend(client), fails(Code.Unavailable, new RegExp(`^no whole answer from ${url}: `)));
    assert.equal(requests.length, 3);
  });
});

test("what a newer gateway says stays as numbers, and its fields are ignored", async () => {
  const newer = create(RecommendResponseSchema, { items: [{ itemId: "7" }], degradations: [Degradation.BUSY, 77] });
  newer.certificate = create(CertificateSchema, { kind: 9 });
  const body = Buffer.concat([toBinary(RecommendResponseSchema, newer), Buffer.from([0x98, 0x06, 0x01])]); // field 99
  await served([answers(body)], async (client) => {
    const answer = await recommend(client);
    assert.deepEqual(answer.degradations, [Degradation.BUSY, 77]);
    assert.equal(answer.certificate.kind, 9);
    assert.equal(answer.items[0].itemId, "7");
  });
});

test("an older gateway lacks the method, and what is no gateway is named by its answer", async () => {
  await served([refuses(404, "unimplemented")], async (client, requests) => {
    await assert.rejects(client.getFreshness({}), fails(Code.Unimplemented, /^m$/));
    assert.equal(requests.length, 1);
  });
  const page = (response) => response.writeHead(200, { "content-type": "text/html" }).end("<html>");
  await served([page], (client) => assert.rejects(recommend(client), fails(Code.Unknown, /text\/html/)));
});

test("a gateway with an IPv6 address alone is found", async () => {
  await served([answers(ANSWER)], async (client) => assert.equal((await recommend(client)).items.length, 1), "::1");
});
