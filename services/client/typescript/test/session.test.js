/** Against a real gateway: FRESHET_URL is its JSON port, FRESHET_ITEMS names some of its items. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Code, ConnectError, Degradation, connect } from "freshet-client";

const client = connect(process.env.FRESHET_URL);
const items = process.env.FRESHET_ITEMS.split(",");
const newUser = () => `user-${crypto.randomUUID()}`;
const ids = (answer) => answer.items.map((item) => item.itemId);
const fails = (code, message) => (error) => {
  assert.ok(error instanceof ConnectError);
  assert.deepEqual([error.code, error.rawMessage], [code, message]);
  return true;
};

async function knownUser() {
  const session = client.session(newUser());
  for (const itemId of items.slice(0, 3)) await session.record(itemId, "like");
  assert.ok((await session.recommend(3)).tokenHonoured);
  return session.userId;
}

test("what is recorded shows in the next answer", async () => {
  const session = client.session(newUser());
  for (const itemId of items.slice(0, 5)) {
    const receipt = await session.record(itemId, "like");
    assert.deepEqual(receipt.token, session.token);
    const answer = await session.recommend(10);
    assert.ok(answer.tokenHonoured);
    assert.equal(answer.stateSource, "stored");
    assert.equal(answer.exposureId, session.exposureId);
    assert.ok(!ids(answer).includes(itemId));
  }
  const { history } = await session.explain(items[6]);
  assert.deepEqual(history.map((event) => event.itemId).toSorted(), items.slice(0, 5).toSorted());
});

test("calls that are made together run one after the other", async () => {
  const session = client.session(newUser());
  const [, , answer] = await Promise.all([session.record(items[0]), session.record(items[1]), session.recommend(50)]);
  assert.ok(answer.tokenHonoured);
  assert.ok(!ids(answer).includes(items[0]) && !ids(answer).includes(items[1]));
});

test("an event that is taken back is gone", async () => {
  const session = client.session(newUser());
  const { eventId } = await session.record(items[0], "like", { eventId: "mine", value: 4, eventTime: new Date() });
  assert.equal(eventId, "mine");
  await session.record(items[1]);
  await session.undo("mine");
  await session.recommend(1);
  assert.deepEqual((await session.explain(items[6])).history.map((event) => event.itemId), [items[1]]);
});

test("pages of a kept list repeat nothing and end", async () => {
  const session = client.session(await knownUser());
  const first = await session.recommend(5, { pageDepth: 15 });
  const [second, third] = [await session.nextPage(), await session.nextPage()];
  assert.deepEqual([second.stateSource, third.stateSource], ["page", "page"]);
  assert.equal(new Set([first, second, third].flatMap(ids)).size, 15);
  assert.equal(session.hasNextPage, false);
  assert.equal(await session.nextPage(), undefined);
});

test("a visitor's history is the session's own, and pages go on without a kept list", async () => {
  const session = client.session();
  assert.ok(session.isVisitor);
  const before = await session.recommend(10);
  assert.equal(await session.record(items[0], "like"), undefined);
  const after = await session.recommend(10, { pageDepth: 25 });
  assert.deepEqual([before.stateSource, after.stateSource], ["none", "request"]);
  assert.ok(!ids(after).includes(items[0]));
  const rest = [await session.nextPage(), await session.nextPage()];
  assert.deepEqual(rest.map((page) => page.items.length), [10, 5]);
  assert.equal(new Set([after, ...rest].flatMap(ids)).size, 25);
  assert.equal(await session.nextPage(), undefined);
  assert.deepEqual(await session.seen(ids(after)[0]), []);
  const message = "userId: a visitor has no recorded events; allowed: a session of a user";
  await assert.rejects(session.undo("x"), fails(Code.FailedPrecondition, message));
});

test("what was shown does not come again", async () => {
  for (const userId of ["", await knownUser()]) {
    const session = client.session(userId, { notAgain: { answers: 2 } });
    const [one, two, three] = [await session.recommend(10), await session.recommend(10), await session.recommend(10)];
    assert.equal(new Set([one, two, three].flatMap(ids)).size, 30);
  }
});

test("impressions name the answer that showed the items", async () => {
  const session = client.session(await knownUser());
  const answer = await session.recommend(5);
  const receipts = await session.seen(...ids(answer).slice(0, 2));
  assert.equal(receipts.length, 2);
  const message = 'itemIds: "no-item" was not shown in this session; allowed: what it answered';
  await assert.rejects(session.seen("no-item"), fails(Code.FailedPrecondition, message));
});

test("a token of another stack is not honoured, and the answer says so", async () => {
  const freshnessToken = { epoch: "another", partition: 3, offset: 7n };
  const answer = await client.recommend({ userId: await knownUser(), k: 5, freshnessToken });
  assert.equal(answer.tokenHonoured, false);
  assert.ok(answer.degradations.includes(Degradation.TOKEN_NOT_HONOURED));
  assert.equal(answer.items.length, 5);
});

test("a clock that is an hour off is accepted, one that is two days ahead refused", async () => {
  const session = client.session(newUser());
  const at = (hours) => ({ eventTime: new Date(Date.now() + hours * 3_600_000) });
  await session.record(items[0], "like", at(-1));
  await session.record(items[1], "like", at(1));
  assert.ok((await session.recommend(3)).tokenHonoured);
  assert.equal((await session.explain(items[6])).history.length, 2);
  await assert.rejects(session.record(items[2], "like", at(48)), (error) => {
    assert.equal(error.code, Code.InvalidArgument);
    assert.match(error.rawMessage, /^interactions\[0\]\.event_time='\d+ ms' allowed: /);
    return true;
  });
});

test("errors have the gateway's words, and a session goes on after one", async () => {
  const session = client.session(newUser());
  await assert.rejects(session.recommend(0), fails(Code.InvalidArgument, "k=0 allowed: 1-1000"));
  assert.equal((await session.recommend(3)).items.length, 3);
  const late = connect(process.env.FRESHET_URL, { timeoutMs: 1 });
  await assert.rejects(late.recommend({ userId: "ann", k: 1000 }), (error) => error.code === Code.DeadlineExceeded);
  const nobody = connect("http://127.0.0.1:9");
  await assert.rejects(nobody.recommend({ userId: "ann", k: 3 }), (error) => error instanceof ConnectError);
});
