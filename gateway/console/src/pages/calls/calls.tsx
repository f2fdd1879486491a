import { CallsTable, STATES } from "../../ui/calls-table";
import { Panel } from "../../ui/parts";
import { go, setQuery } from "../../ui/router";
import type { PageProps } from "..";

const ID = /^[0-9a-z]{26}(?:-\d+)?$/i;

export default function CallsPage({ query }: PageProps) {
  const name = query["function"] ?? "";
  const state = query["state"] ?? "";
  const key = query["key"] ?? "";
  const until = query["until"] ?? "";
  return (
    <div class="page">
      <div class="title">
        <h1>Calls</h1>
      </div>
      <form class="toolbar" onSubmit={(event) => event.preventDefault()}>
        <input
          type="search"
          aria-label="Function, or id of a call"
          placeholder="Name of a function, or id of a call"
          value={name}
          onChange={(event) => search(event.currentTarget.value.trim())}
        />
        <label>
          <span class="hidden">State</span>
          <select value={state} onChange={(event) => setQuery({ state: event.currentTarget.value })}>
            <option value="">All states</option>
            {STATES.map((each) => (
              <option key={each} value={each}>
                {each.replace("_", " ")}
              </option>
            ))}
          </select>
        </label>
        <input
          class="short"
          aria-label="Id of an API key"
          placeholder="Id of an API key"
          value={key}
          onChange={(event) => setQuery({ key: event.currentTarget.value.trim() })}
        />
        <label>
          until{" "}
          <input
            type="datetime-local"
            step={1}
            value={until}
            onChange={(event) => setQuery({ until: event.currentTarget.value })}
          />
        </label>
        {name || state || key || until ? (
          <button type="button" onClick={() => setQuery({ function: "", state: "", key: "", until: "" })}>
            Show all
          </button>
        ) : null}
      </form>
      <Panel title="Submitted calls" note="newest first; times are in your time zone">
        <CallsTable functionName={name} state={state} apiKey={key} until={secondsOf(until)} />
      </Panel>
    </div>
  );
}

function search(text: string): void {
  if (ID.test(text)) {
    go(`/calls/${text.toLowerCase()}`);
  } else {
    setQuery({ function: text });
  }
}

function secondsOf(text: string): number | null {
  const milliseconds = text ? new Date(text).getTime() : Number.NaN;
  return Number.isNaN(milliseconds) ? null : milliseconds / 1000;
}
