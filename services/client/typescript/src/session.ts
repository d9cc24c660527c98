/**
 * One user's visit: it carries the freshness token, the page, what was shown and under which exposure.
 *
 * What is recorded in a session shows in its next answer, or the answer says that it does not (`tokenHonoured`). Calls of
 * one session run one after the other. It lives in memory, and behaves as the Python client's.
 */
import { type MessageInitShape, create } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import { Code, type Client, ConnectError } from "@connectrpc/connect";

import { FilterSchema, type FreshnessToken } from "./gen/freshet/v1/common_pb.js";
import {
  type ExplainResponse,
  type GatewayService,
  HistoryEventSchema,
  type HistoryEvent,
  type InteractionReceipt,
  NotAgainSchema,
  type RecommendRequestSchema,
  type RecommendResponse,
} from "./gen/freshet/v1/gateway_pb.js";

// The gateway's limits: denied items of a request, events of a history, answers and items of each that it remembers.
const MAX_DENIED = 10_000, MAX_HISTORY = 1_000, MAX_ANSWERS = 50, MAX_ITEMS = 200;
const MAX_EXPOSED = 10_000;

/** Fields of a RecommendRequest. */
export type RecommendOptions = Extract<MessageInitShape<typeof RecommendRequestSchema>, { $typeName?: never }>;

export interface SessionOptions {
  /** Which of the session's answers are not to come again: the last ones, or those of the last minutes. */
  notAgain?: { answers?: number; minutes?: number };
}

export interface RecordOptions {
  value?: number;
  /** Give it where you repeat a write that failed: it counts once. */
  eventId?: string;
  eventTime?: Date;
  /** The words that led to the item. */
  query?: string;
  context?: Record<string, string>;
}

interface List {
  k: number;
  depth: number;
  options: RecommendOptions;
  /** Empty where the gateway keeps no list. */
  token: string;
  shown: string[];
}

export class Session {
  readonly userId: string;
  /** Whether the user has no id: the history is the session's own, and nothing is written. */
  readonly isVisitor: boolean;
  #token: FreshnessToken | undefined;
  #exposureId = "";
  #history: HistoryEvent[] = [];
  #exposed = new Map<string, { exposureId: string; position: number }>();
  #answers: { at: number; itemIds: string[] }[] = [];
  #list: List | undefined;
  #last: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly client: Client<typeof GatewayService>,
    userId = "",
    private readonly options: SessionOptions = {},
  ) {
    this.isVisitor = userId === "";
    this.userId = userId || `visitor-${crypto.randomUUID()}`;
  }

  /** Of the newest write in this session. */
  get token(): FreshnessToken | undefined {
    return this.#token;
  }

  /** Of the latest answer; empty before the first. */
  get exposureId(): string {
    return this.#exposureId;
  }

  /** Whether `nextPage` may answer something. */
  get hasNextPage(): boolean {
    const list = this.#list;
    return list !== undefined && (list.token !== "" || (list.shown.length > 0 && list.shown.length < list.depth));
  }

  /** The top k items, from a state that reflects what was recorded here, or the answer says that it does not. With `pageDepth` above k, `nextPage` goes on with the list. */
  recommend(k = 10, options: RecommendOptions = {}): Promise<RecommendResponse> {
    return this.#inTurn(async () => {
      const answer = await this.client.recommend(this.#filled(k, options));
      this.#answered(answer, 1);
      const depth = options.pageDepth ?? 0;
      const shown = answer.items.map((item) => item.itemId);
      this.#list = depth > k ? { k, depth, options, token: answer.nextPageToken, shown } : undefined;
      return answer;
    });
  }

  /** The next items of the list, undefined after its end. A list that the gateway does not keep (of a visitor, of a new user) goes on with the best of what was not shown. Rejects with FailedPrecondition for a list that has ended; recommend again. */
  nextPage(k?: number): Promise<RecommendResponse | undefined> {
    return this.#inTurn(async () => {
      const list = this.#list;
      if (list === undefined || !this.hasNextPage) return undefined;
      const number = k ?? list.k;
      const wasKept = list.token !== "";
      const request = wasKept
        ? { userId: this.userId, k: number, pageToken: list.token, notAgain: this.options.notAgain }
        : this.#filled(Math.min(number, list.depth - list.shown.length), { ...list.options, pageDepth: 0 }, list.shown);
      const answer = await this.client.recommend(request).catch((error: unknown) => {
        if (ConnectError.from(error).code === Code.FailedPrecondition) this.#list = undefined;
        throw error;
      });
      this.#answered(answer, wasKept ? list.shown.length + 1 : 1);
      list.shown.push(...answer.items.map((item) => item.itemId));
      list.token = answer.nextPageToken;
      if (answer.items.length === 0 || (wasKept && list.token === "")) this.#list = undefined;
      return answer.items.length > 0 ? answer : undefined;
    });
  }

  /** Write what the user did with an item, as the answer to the exposure that showed it. A visitor's goes into the session's history, and there is no receipt. */
  record(itemId: string, type = "", options: RecordOptions = {}): Promise<InteractionReceipt | undefined> {
    return this.#inTurn(async () => {
      const { value = 0, eventId = crypto.randomUUID(), query = "", context = {} } = options;
      const eventTime = options.eventTime && timestampFromDate(options.eventTime);
      if (this.isVisitor) {
        const at = eventTime ?? timestampFromDate(new Date());
        this.#history.push(create(HistoryEventSchema, { itemId, eventTime: at, type, value }));
        this.#history.sort((one, other) => Number(one.eventTime!.seconds - other.eventTime!.seconds));
        this.#history.splice(0, this.#history.length - MAX_HISTORY);
        return undefined;
      }
      const exposureId = this.#exposed.get(itemId)?.exposureId ?? "";
      const done = { userId: this.userId, itemId, type, value, eventId, eventTime, query, context, exposureId };
      const { receipts } = await this.client.recordInteractions({ interactions: [done] });
      return this.#recorded(receipts[0]!);
    });
  }

  /** Take one event of the user back; the next answer reflects that. */
  undo(eventId: string): Promise<InteractionReceipt> {
    return this.#inTurn(async () => {
      if (this.isVisitor) throw refused("userId: a visitor has no recorded events; allowed: a session of a user");
      const { receipt } = await this.client.undoInteraction({ userId: this.userId, eventId });
      return this.#recorded(receipt!);
    });
  }

  /** Say which of the items that this session answered came onto the screen; nothing is written of a visitor. */
  seen(...itemIds: string[]): Promise<InteractionReceipt[]> {
    return this.#inTurn(async () => {
      const byExposure = new Map<string, { itemId: string; position: number }[]>();
      for (const itemId of new Set(itemIds)) {
        const shown = this.#exposed.get(itemId);
        if (!shown) throw refused(`itemIds: "${itemId}" was not shown in this session; allowed: what it answered`);
        const { exposureId, position } = shown;
        byExposure.set(exposureId, [...(byExposure.get(exposureId) ?? []), { itemId, position }]);
      }
      const found: InteractionReceipt[] = [];
      for (const [exposureId, impressions] of this.isVisitor ? [] : byExposure) {
        const answer = await this.client.recordImpressions({ userId: this.userId, exposureId, impressions });
        found.push(...answer.receipts.map((receipt) => this.#recorded(receipt)));
      }
      return found;
    });
  }

  /** Why an item has its score for this user. */
  explain(itemId: string): Promise<ExplainResponse> {
    return this.#inTurn(() => this.client.explain({ userId: this.userId, itemId, history: this.#history }));
  }

  #inTurn<T>(call: () => Promise<T>): Promise<T> {
    const done = this.#last.then(call);
    this.#last = done.catch(() => undefined);
    return done;
  }

  /** The call's own options with what the session adds. */
  #filled(k: number, options: RecommendOptions, shown: string[] = []): RecommendOptions {
    const notAgain = options.notAgain ?? this.options.notAgain;
    const denied = [...shown, ...this.#shownBefore(notAgain)];
    const filled: RecommendOptions = { freshnessToken: this.#token, notAgain, ...options, userId: this.userId, k };
    if (this.isVisitor) {
      filled.history = options.history?.length ? options.history : this.#history;
      filled.notAgain = undefined;
      filled.pageDepth = 0;
    }
    if (denied.length > 0) {
      const filter = create(FilterSchema, options.filter ?? {});
      filter.denyItemIds = [...new Set([...filter.denyItemIds, ...denied])].slice(0, MAX_DENIED);
      filled.filter = filter;
    }
    return filled;
  }

  /** Newest first: the gateway remembers answers to users with a stored history alone. */
  #shownBefore(asked: RecommendOptions["notAgain"]): string[] {
    if (asked === undefined) return [];
    const { answers, minutes } = create(NotAgainSchema, asked);
    const since = performance.now() - 60_000 * minutes;
    return this.#answers
      .toReversed()
      .filter(({ at }, number) => number < answers || (minutes > 0 && at >= since))
      .flatMap(({ itemIds }) => itemIds);
  }

  #answered(answer: RecommendResponse, firstPosition: number): void {
    const itemIds = answer.items.map((item) => item.itemId);
    this.#exposureId = answer.exposureId;
    this.#answers.push({ at: performance.now(), itemIds: itemIds.slice(0, MAX_ITEMS) });
    this.#answers.splice(0, this.#answers.length - MAX_ANSWERS);
    itemIds.forEach((itemId, place) => {
      this.#exposed.delete(itemId);
      this.#exposed.set(itemId, { exposureId: answer.exposureId, position: firstPosition + place });
    });
    for (const itemId of this.#exposed.keys()) {
      if (this.#exposed.size <= MAX_EXPOSED) break;
      this.#exposed.delete(itemId);
    }
  }

  /** The newest token of the user's own partition; one of another epoch or partition replaces it. */
  #recorded(receipt: InteractionReceipt): InteractionReceipt {
    const { token } = receipt;
    const old = this.#token;
    const isOlder = old && token && old.epoch === token.epoch && old.partition === token.partition && old.offset >= token.offset;
    if (token && !isOlder) this.#token = token;
    return receipt;
  }
}

function refused(message: string): ConnectError {
  return new ConnectError(message, Code.FailedPrecondition);
}
