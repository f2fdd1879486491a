import { useMemo } from "preact/hooks";
import { usePolled } from "../../api/poll";
import type { Call } from "../../api/views";
import { duration, number, plural } from "../../core/format";
import { chainOf, lanesOf, verdictOf, type Item, type Verdict } from "../../core/path/critical";
import { ticksOf } from "../../core/timeline";
import { Panel } from "../../ui/parts";
import { Link } from "../../ui/router";
import { Scroll } from "../../ui/scroll";

const ITEMS = 300;
const MOST_LANES = 30;
const MOST_LINKS = 8;
const WIDTH = 900;
const LEFT = 8;
const LANE = 18;
const TOP = 18;

/** The items that ended last, on a line for each worker, and those of them that decided when the map ended. */
export function Lanes({ id, isOver }: { id: string; isOver: boolean }) {
  const { data } = usePolled<{ items: readonly Call[] }>(`/v1/maps/${id}/items?limit=${ITEMS}`, isOver ? 600_000 : 3_000);
  const items = useMemo(() => (data?.items ?? []).flatMap(itemOf), [data]);
  const failed = useMemo(() => new Set((data?.items ?? []).filter((each) => each.error).map((each) => each.id)), [data]);
  const chain = useMemo(() => chainOf(items), [items]);
  if (items.length === 0) {
    return null;
  }
  const lanes = lanesOf(items);
  const start = Math.min(...items.map((each) => each.start));
  const end = Math.max(...items.map((each) => each.end));
  const length = Math.max(end - start, 1e-6);
  const x = (at: number): number => LEFT + ((at - start) / length) * (WIDTH - 2 * LEFT);
  const shown = lanes.slice(0, MOST_LANES);
  const height = TOP + LANE * shown.length + 4;
  const onPath = new Set(chain.map((each) => each.id));
  return (
    <Panel title="Critical path" note={`${plural(items.length, "item")} that ended last, on ${plural(lanes.length, "line")} of ${plural(new Set(items.map((each) => each.worker)).size, "worker")}`}>
      <div class="body">
        <p>
          {WORDS[verdictOf(chain, items)]} {chain.length > MOST_LINKS ? "Its last items" : "Its items"}:{" "}
          {chain.slice(-MOST_LINKS).map((item, index) => (
            <span key={item.id}>
              {index ? ", " : ""}
              <Link to={`/calls/${item.id}`}>{indexOf(item)}</Link> ({duration(item.end - item.start)})
            </span>
          ))}
          .
        </p>
        <figure class="plot">
          <Scroll label="Items on their workers">
            <svg viewBox={`0 0 ${WIDTH} ${height}`} role="img" aria-label="Items on the lines of their workers; those on the critical path are strong">
              {ticksOf(length).map((tick) => (
                <g key={tick}>
                  <line class="grid" x1={x(start + tick)} x2={x(start + tick)} y1={TOP - 4} y2={height} />
                  <text x={x(start + tick)} y={11} text-anchor={tick === 0 ? "start" : "middle"}>
                    {duration(tick)}
                  </text>
                </g>
              ))}
              {shown.map((lane, row) =>
                lane.items.map((item) => (
                  <rect
                    key={item.id}
                    class={`lane ${failed.has(item.id) ? "bad" : ""} ${onPath.has(item.id) ? "on-path" : ""}`}
                    x={x(item.start)}
                    width={Math.max(1, x(item.end) - x(item.start) - 0.5)}
                    y={TOP + row * LANE}
                    height={LANE - 3}
                  >
                    <title>{`item ${indexOf(item)}: ${duration(item.end - item.start)}, worker ${item.worker}`}</title>
                  </rect>
                )),
              )}
            </svg>
          </Scroll>
          <figcaption>
            <span class="key lane-key-path">on the path</span>
            <span class="key lane-key-other">other items</span>
            <span class="key bad">failed</span>
            {lanes.length > shown.length ? <span class="dim">{number(lanes.length - shown.length)} further lines are not drawn</span> : null}
          </figcaption>
        </figure>
      </div>
    </Panel>
  );
}

const WORDS: Readonly<Record<Verdict, string>> = {
  straggler: "The last item ran several times as long as most: it decided the end.",
  saturated: "The worker of the last item ran one item after another: more workers, or a larger concurrency, end the map sooner.",
  waiting: "The worker of the last item was often idle before it: the items arrived slowly, or waited for a worker to start.",
};

function itemOf(call: Call): Item[] {
  return call.started_at === null || call.ended_at === null ? [] : [{ id: call.id, worker: call.worker, start: call.started_at, end: call.ended_at }];
}

function indexOf(item: Item): string {
  return item.id.split("-")[1] ?? item.id;
}
