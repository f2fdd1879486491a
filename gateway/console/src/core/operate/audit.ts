/** The hash chain of the audit log (docs/audit.md): each record has the SHA-256 of the one before. Pure. */

export interface AuditRecord {
  readonly seq: number;
  readonly at: number;
  readonly principal?: string;
  readonly label?: string;
  readonly address?: string;
  readonly request_id?: string;
  readonly action: string;
  readonly object?: string;
  readonly status: number;
  readonly code?: string;
  readonly details?: Readonly<Record<string, string>>;
  readonly count?: number;
  readonly previous: string;
}

export const START = "0".repeat(64);

/** The elements of the array of a JSON object, as they are written. The gateway sends records as they are stored, and a hash is that of their bytes. */
export function writtenElements(json: string, name: string): string[] {
  const elements: string[] = [];
  let at = json.indexOf(`"${name}":[`) + name.length + 4;
  let start = at;
  let depth = 0;
  for (; at < json.length; at += 1) {
    const character = json[at];
    if (character === '"') {
      at = endOfString(json, at);
    } else if (character === "{" || character === "[") {
      depth += 1;
    } else if (character === "}" || (character === "]" && depth > 0)) {
      depth -= 1;
    } else if ((character === "," || character === "]") && depth === 0) {
      const element = json.slice(start, at);
      if (element) {
        elements.push(element);
      }
      start = at + 1;
      if (character === "]") {
        break;
      }
    }
  }
  return elements;
}

function endOfString(json: string, start: number): number {
  let at = start + 1;
  while (at < json.length && json[at] !== '"') {
    at += json[at] === "\\" ? 2 : 1;
  }
  return at;
}

export interface Chain {
  readonly count: number;
  readonly first: number | null;
  readonly last: number | null;
  /** The hash of the last record. */
  readonly hash: string;
  readonly fault: { readonly seq: number; readonly reason: string } | null;
  /** Whether a record has the hash that was noted earlier. */
  readonly hasNoted: boolean;
}

export const EMPTY_CHAIN: Chain = { count: 0, first: null, last: null, hash: "", fault: null, hasNoted: false };

/** Add the next record of the log, whose bytes have `hash`. The first one is trusted to follow its `previous`. */
export function withRecord(chain: Chain, record: AuditRecord, hash: string, noted: string): Chain {
  if (chain.fault !== null) {
    return chain;
  }
  const reason = faultOf(chain, record);
  if (reason !== null) {
    return { ...chain, fault: reason };
  }
  return { count: chain.count + 1, first: chain.first ?? record.seq, last: record.seq, hash, fault: null, hasNoted: chain.hasNoted || hash === noted };
}

function faultOf(chain: Chain, record: AuditRecord): Chain["fault"] {
  if (chain.last === null) {
    return record.seq === 1 && record.previous !== START ? { seq: 1, reason: "it claims a record before the first one" } : null;
  }
  if (record.seq !== chain.last + 1) {
    return { seq: chain.last + 1, reason: `it is missing: record ${record.seq} follows ${chain.last}` };
  }
  return record.previous === chain.hash ? null : { seq: record.seq, reason: `it does not follow record ${chain.last}: one of the two was changed` };
}
