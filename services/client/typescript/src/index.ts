/**
 * Client of Freshet's gateway for Node and browsers: every method of `GatewayService` over its JSON port, and sessions
 * that carry what one visit has to remember.
 */
import { type Client as ConnectClient, type Interceptor, createClient } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";

import { GatewayService } from "./gen/freshet/v1/gateway_pb.js";
import { retrying } from "./retrying.js";
import { Session, type SessionOptions } from "./session.js";

export { Code, ConnectError } from "@connectrpc/connect";
export * from "./gen/freshet/v1/common_pb.js";
export * from "./gen/freshet/v1/gateway_pb.js";
export { type RecommendOptions, type RecordOptions, Session, type SessionOptions } from "./session.js";

export interface ClientOptions {
  /** Goes with each call. In a page, its readers know it. */
  apiKey?: string;
  /** The deadline of a call that names none, in milliseconds. */
  timeoutMs?: number;
  /** Nobody waits for the answers: the gateway may refuse these calls first. */
  isBackground?: boolean;
}

/** The gateway's methods, and sessions. A failed call rejects with a `ConnectError`: its code, and a message that names field, value and what is allowed. */
export interface Client extends ConnectClient<typeof GatewayService> {
  /** One visit of a user. Without an id it is a visitor's, and the session writes no events. */
  session(userId?: string, options?: SessionOptions): Session;
}

/** A client of the gateway whose JSON port is at `baseUrl`, such as "http://127.0.0.1:50080". */
export function connect(baseUrl: string, options: ClientOptions = {}): Client {
  const headers: Interceptor = (next) => (request) => {
    if (options.apiKey) request.header.set("authorization", `Bearer ${options.apiKey}`);
    if (options.isBackground) request.header.set("freshet-priority", "background");
    return next(request);
  };
  const transport = createConnectTransport({
    baseUrl,
    interceptors: [headers, retrying(baseUrl)],
    defaultTimeoutMs: options.timeoutMs ?? 5_000,
    // JSON would leave out the values of enums that a newer gateway has, degradations among them.
    useBinaryFormat: true,
  });
  const client = createClient(GatewayService, transport);
  return { ...client, session: (userId = "", given = {}) => new Session(client, userId, given) };
}
