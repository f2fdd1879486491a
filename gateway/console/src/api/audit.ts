/** The audit log: its last records, and the check of its hash chain. */

import { EMPTY_CHAIN, withRecord, writtenElements, type AuditRecord, type Chain } from "../core/operate/audit";
import { send } from "./request";

export interface AuditPage {
  readonly records: readonly AuditRecord[];
  readonly head: { readonly seq: number; readonly hash: string; readonly at: number } | null;
}

const PART = 1_000;

/** Read the whole log and check it. `show` gets the chain so far, and the number of records. */
export async function verifyLog(noted: string, show: (chain: Chain, all: number) => void, signal: AbortSignal): Promise<Chain> {
  let chain = EMPTY_CHAIN;
  let after = 0;
  for (;;) {
    const text = await (await send(`/v1/audit?after=${after}&limit=${PART}`, { signal })).text();
    const written = writtenElements(text, "records");
    const { head } = JSON.parse(text) as AuditPage;
    for (const record of written) {
      chain = withRecord(chain, JSON.parse(record) as AuditRecord, await sha256(record), noted);
    }
    const last = written[written.length - 1];
    show(chain, head?.seq ?? 0);
    if (last === undefined || chain.fault !== null) {
      return chain;
    }
    after = (JSON.parse(last) as AuditRecord).seq;
    if (head !== null && after >= head.seq) {
      return chain;
    }
  }
}

async function sha256(text: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
