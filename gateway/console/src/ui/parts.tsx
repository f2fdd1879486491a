/** Small parts of pages. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Problem } from "../api/request";
import type { Connection } from "../api/live";
import { ago, time } from "../core/format";

export type Tone = "ok" | "warn" | "bad" | "info" | "quiet";

export function Badge({ tone, children }: { tone: Tone; children: ComponentChildren }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

interface PanelProps {
  readonly title: string;
  readonly note?: ComponentChildren;
  readonly actions?: ComponentChildren;
  readonly children: ComponentChildren;
}

export function Panel({ title, note, actions, children }: PanelProps) {
  return (
    <section class="panel">
      <header>
        <h2>{title}</h2>
        {note ? <span class="note">{note}</span> : null}
        {actions ? <span class="actions">{actions}</span> : null}
      </header>
      {children}
    </section>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p>{title}</p>
      {children ? <div class="next">{children}</div> : null}
    </div>
  );
}

const NEXT_STEPS: Readonly<Record<string, string>> = {
  no_connection: "The page tries again by itself.",
  unauthorized: "Sign in again.",
  forbidden: "Ask an administrator for a key with this scope.",
  function_not_found: "See the list of functions: it may have been deleted.",
  invocation_not_found: "Results are kept for the retention time of the function, a day by default.",
  capacity: "Close other pages of the console, or try again in a few seconds.",
};

/** An error with its code and the next step. */
export function ErrorBox({ error }: { error: unknown }) {
  const problem = error instanceof Problem ? error : null;
  const code = problem?.code ?? "console_error";
  const text = error instanceof Error ? error.message : String(error);
  return (
    <div class="error" role="alert">
      <p>
        <strong>{text}</strong>
      </p>
      <p class="dim">
        <code>{code}</code>
        {problem && problem.status ? ` · HTTP ${problem.status}` : ""}
        {typeof problem?.fields["request_id"] === "string" ? ` · request ${problem.fields["request_id"]}` : ""}
        {NEXT_STEPS[code] ? ` · ${NEXT_STEPS[code]}` : ""}
      </p>
    </div>
  );
}

export function Loading({ what }: { what: string }) {
  return (
    <p class="loading" role="status">
      Loading {what} …
    </p>
  );
}

export function LiveMark({ connection }: { connection: Connection }) {
  const texts: Record<Connection, string> = { connecting: "connecting", live: "live", reconnecting: "reconnecting" };
  return (
    <span class={`live ${connection}`} role="status">
      {texts[connection]}
    </span>
  );
}

/** The time, renewed each second, for texts such as "5 s ago". */
export function useNow(everyMs = 1000): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}

export function Ago({ at }: { at: number | null | undefined }) {
  const now = useNow(5000);
  return at === null || at === undefined ? (
    <span>–</span>
  ) : (
    <time dateTime={new Date(at * 1000).toISOString()} title={time(at)}>
      {ago(at, now)}
    </time>
  );
}

export function Stat({ label, value, note }: { label: string; value: ComponentChildren; note?: ComponentChildren }) {
  return (
    <div class="stat">
      <dt>{label}</dt>
      <dd>
        {value}
        {note ? <small>{note}</small> : null}
      </dd>
    </div>
  );
}
