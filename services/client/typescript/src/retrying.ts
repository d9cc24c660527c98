/** Repeats of calls, as protos/freshet/v1/service_config.json says, within the call's deadline. Each write has an id, so it counts once. */
import { Code, ConnectError, type Interceptor } from "@connectrpc/connect";

import type { RecordInteractionsRequest } from "./gen/freshet/v1/gateway_pb.js";

const READS = { attempts: 3, firstMs: 50, longestMs: 500, codes: [Code.Unavailable] };
const WRITES = { attempts: 5, firstMs: 100, longestMs: 2_000, codes: [Code.Unavailable, Code.ResourceExhausted] };
const MAX_TOKENS = 20, TOKENS_OF_AN_ANSWER = 0.1;

export function retrying(baseUrl: string): Interceptor {
  // At half of them, most calls fail: then none is repeated.
  let tokens = MAX_TOKENS;
  return (next) => async (request) => {
    const { name } = request.method;
    if (name === "RecordInteractions") {
      for (const one of (request.message as RecordInteractionsRequest).interactions) one.eventId ||= crypto.randomUUID();
    }
    const policy = name === "RecordInteractions" || name === "UndoInteraction" ? WRITES : READS;
    for (let attempt = 1; ; attempt++) {
      try {
        const answer = await next(request);
        tokens = Math.min(MAX_TOKENS, tokens + TOKENS_OF_AN_ANSWER);
        return answer;
      } catch (reason) {
        if (request.signal.aborted) throw reason;
        const error = explained(reason, baseUrl);
        if (!policy.codes.includes(error.code)) throw error;
        tokens = Math.max(0, tokens - 1);
        if (attempt === policy.attempts || tokens <= MAX_TOKENS / 2) throw error;
        const told = error.metadata.get("retry-after-ms");
        const longest = Math.min(policy.firstMs * 2 ** (attempt - 1), policy.longestMs);
        await pause(told === null ? Math.random() * longest : Number(told), request.signal);
      }
    }
  };
}

/** Fetch rejects with a TypeError where nothing answers, or where an answer ends before its end. */
function explained(reason: unknown, baseUrl: string): ConnectError {
  if (!(reason instanceof TypeError)) return ConnectError.from(reason);
  const why = reason.cause instanceof Error && reason.cause.message ? reason.cause.message : reason.message;
  return new ConnectError(`no whole answer from ${baseUrl}: ${why}`, Code.Unavailable, undefined, undefined, reason);
}

function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
