import { useNewest } from "../../api/newest";
import type { MapStatus } from "../../api/records";
import { number } from "../../core/format";
import { FunctionLink } from "../../ui/function-link";
import { FunctionFilter } from "../../ui/lists/functions-filter";
import { NewestPanel } from "../../ui/lists/newest-panel";
import { MapState } from "./state";
import { Ago, Badge, Empty } from "../../ui/parts";
import { Bar } from "../../ui/progress";
import { Link } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";

export default function MapsPage({ query }: PageProps) {
  const name = query["function"] ?? "";
  const newest = useNewest<MapStatus>(`/v1/maps${name ? `?function=${encodeURIComponent(name)}` : ""}`, "maps");
  return (
    <div class="page">
      <div class="title">
        <h1>Maps</h1>
      </div>
      <FunctionFilter name={name} />
      <NewestPanel title="Maps" what="map" newest={newest}>
        {(rows) => <Table maps={rows} />}
      </NewestPanel>
    </div>
  );
}

function Table({ maps }: { maps: readonly MapStatus[] }) {
  if (maps.length === 0) {
    return (
      <Empty title="No map is here.">
        <code>.map()</code> of a function, or <code>gpufn map NAME --data @FILE</code>, calls it for each item.
      </Empty>
    );
  }
  return (
    <Scroll label="Maps">
      <table>
        <thead>
          <tr>
            <th>Map</th>
            <th>Function</th>
            <th>State</th>
            <th>Progress</th>
            <th class="number">Ended</th>
            <th class="number">Failed</th>
            <th class="number">Items</th>
            <th>Submitted</th>
          </tr>
        </thead>
        <tbody>
          {maps.map((map) => (
            <tr key={map.id}>
              <td class="mono">
                <Link to={`/maps/${map.id}`}>{map.id}</Link>
              </td>
              <td>
                <FunctionLink name={map.function} />
              </td>
              <td>
                <MapState state={map.state} />
              </td>
              <td>
                <Bar label={`Progress of ${map.id}`} share={map.accepted ? map.ended / map.accepted : 0} tone={map.state === "ended" ? "ok" : "accent"} />
              </td>
              <td class="number">{number(map.ended)}</td>
              <td class="number">{map.failed ? <Badge tone="bad">{number(map.failed)}</Badge> : 0}</td>
              <td class="number">{number(map.accepted)}</td>
              <td>
                <Ago at={map.submitted_at} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
