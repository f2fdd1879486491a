import type { NodeView } from "../../api/views";
import { heatClass, heatOf, METRICS, shortUuid, type Metric } from "../../core/operate/heat";
import { plural } from "../../core/format";
import { Panel } from "../../ui/parts";
import { Link, setQuery } from "../../ui/router";

interface HeatMapProps {
  readonly nodes: Readonly<Record<string, NodeView>>;
  readonly metric: Metric;
}

/** Each GPU as a cell, in the colour of one metric. A cell leads to the GPU. */
export function HeatMap({ nodes, metric }: HeatMapProps) {
  const withGpus = Object.entries(nodes).filter(([, node]) => Object.keys(node.gpus).length > 0);
  const count = withGpus.reduce((sum, [, node]) => sum + Object.keys(node.gpus).length, 0);
  if (count === 0) {
    return null;
  }
  return (
    <Panel
      title="GPUs"
      note={plural(count, "GPU")}
      actions={
        <label>
          <span class="hidden">Metric</span>
          <select value={metric} onChange={(event) => setQuery({ metric: event.currentTarget.value })}>
            {Object.entries(METRICS).map(([key, text]) => (
              <option key={key} value={key}>
                {text}
              </option>
            ))}
          </select>
        </label>
      }
    >
      <div class="body">
        {withGpus.map(([name, node]) => (
          <div key={name} class="heat-row">
            <Link to={`/nodes/${name}`} class="heat-node">
              {name}
            </Link>
            <ul class="heat-cells" aria-label={`GPUs of ${name}, ${METRICS[metric]}`}>
              {Object.entries(node.gpus).map(([uuid, gpu]) => {
                const { share, text } = heatOf(metric, gpu);
                const isIll = gpu.health !== "healthy";
                return (
                  <li key={uuid}>
                    <Link to={`/nodes/${name}`} query={{ gpu: uuid }} class={`heat-cell ${heatClass(share)}${isIll ? " ill" : ""}`}>
                      <span class="hidden">
                        {gpu.kind} {shortUuid(uuid)}:{" "}
                      </span>
                      <span class="heat-value">{text}</span>
                      <small>{isIll ? gpu.health : gpu.kind.replace(/^NVIDIA /, "")}</small>
                    </Link>
                  </li>
                );
              })}
            </ul>
          </div>
        ))}
        <p class="dim heat-scale" aria-hidden="true">
          <span>0 %</span>
          {[0, 2, 4, 6, 8, 10].map((level) => (
            <span key={level} class={`heat-step heat-${level}`} />
          ))}
          <span>
            100 % {metric === "temperature" ? "of the temperature at which the GPU slows down" : metric === "power" ? "of the power limit" : ""}
          </span>
        </p>
      </div>
    </Panel>
  );
}
