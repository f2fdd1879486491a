/** Log lines with a search. Output of users is shown as text: its escape sequences do nothing. */

import { Component } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Lines } from "../api/lines";
import type { LogLine } from "../core/errors";
import { clock, plural, visible } from "../core/format";
import { memo } from "./memo";
import { Empty, ErrorBox } from "./parts";
import { Link } from "./router";

const SHOWN = 1_000;
const BLOCK = 50;
const NEAR_END_PX = 40;

interface LogViewProps {
  readonly log: Lines;
  readonly empty: string;
  readonly withCalls?: boolean;
}

export function LogView({ log, empty, withCalls = true }: LogViewProps) {
  const [search, setSearch] = useState("");
  const matching = useMemo(() => found(log.lines, search), [log.lines, search]);
  const shown = matching.slice(-SHOWN);
  return (
    <div class="body">
      <div class="toolbar">
        <input
          type="search"
          aria-label="Search the log"
          placeholder="Search the text, a worker or a call"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
        <span class="dim" role="status">
          {search ? `${matching.length.toLocaleString("en")} of ` : ""}
          {plural(log.lines.length, "line")}
          {matching.length > SHOWN ? `, the last ${SHOWN.toLocaleString("en")} are shown` : ""}
        </span>
      </div>
      {log.problem ? <ErrorBox error={log.problem} /> : null}
      {log.isLive && log.lines.length === 0 ? <Empty title={empty} /> : <Text lines={shown} withCalls={withCalls} />}
    </div>
  );
}

function found(lines: readonly LogLine[], search: string): readonly LogLine[] {
  const wanted = search.toLowerCase();
  if (!wanted) {
    return lines;
  }
  return lines.filter((line) => [line.text, line.worker, line.invocation ?? ""].some((text) => text.toLowerCase().includes(wanted)));
}

function Text({ lines, withCalls }: { lines: readonly LogLine[]; withCalls: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  useEffect(() => {
    if (box.current && isAtEnd.current) {
      box.current.scrollTop = box.current.scrollHeight;
    }
  }, [lines]);
  function onScroll(): void {
    const element = box.current;
    isAtEnd.current = element !== null && element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_END_PX;
  }
  return (
    <div class={withCalls ? "log with-calls" : "log"} ref={box} onScroll={onScroll} tabIndex={0} role="log" aria-label="Log lines" aria-live="off">
      {inBlocks(lines).map(([number, block]) => (
        <Block key={number} first={block[0]} last={block[block.length - 1]} length={block.length} withCalls={withCalls} lines={block} />
      ))}
    </div>
  );
}

/** Blocks of neighbouring lines. New lines change only the last block. */
function inBlocks(lines: readonly LogLine[]): [number, LogLine[]][] {
  const blocks = new Map<number, LogLine[]>();
  for (const line of lines) {
    const number = Math.floor((line.number ?? 0) / BLOCK);
    const block = blocks.get(number);
    if (block) {
      block.push(line);
    } else {
      blocks.set(number, [line]);
    }
  }
  return [...blocks];
}

interface BlockProps {
  readonly first: LogLine | undefined;
  readonly last: LogLine | undefined;
  readonly length: number;
  readonly withCalls: boolean;
  readonly lines: readonly LogLine[];
}

/** Lines of one block are the same if the first, the last and their number are. */
class Block extends Component<BlockProps> {
  override shouldComponentUpdate(next: Readonly<BlockProps>): boolean {
    const { first, last, length } = this.props;
    return first !== next.first || last !== next.last || length !== next.length;
  }

  override render({ lines, withCalls }: BlockProps) {
    return (
      <div>
        {lines.map((line) => (
          <Line key={line.number} line={line} withCalls={withCalls} />
        ))}
      </div>
    );
  }
}

const Line = memo(function Line({ line, withCalls }: { line: LogLine; withCalls: boolean }) {
  return (
    <div class={`line of-${line.stream}`}>
      <span class="at">{clock(line.at)}</span>
      <span class="from" title={`worker ${line.worker}, revision ${line.revision}`}>
        {withCalls && line.invocation ? (
          <Link to={`/calls/${line.invocation}`}>{line.invocation.slice(-6)}</Link>
        ) : (
          line.worker.slice(-6)
        )}
      </span>
      <span class="text">{visible(line.text.trimEnd())}</span>
    </div>
  );
});
