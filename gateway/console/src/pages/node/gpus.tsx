import type { Gpu, GpuShare } from "../../api/views";
import { bytes, number, percent, visible } from "../../core/format";
import { heatClass, heatOf, shortUuid, type Metric } from "../../core/operate/heat";
import { Badge, Empty, Panel, type Tone } from "../../ui/parts";
import { Link } from "../../ui/router";
import { Advice } from "../nodes/advice";
import { Scroll } from "../../ui/scroll";

const TONES: Readonly<Record<Gpu["health"], Tone>> = { healthy: "ok", degraded: "warn", failed: "bad" };
const MODES: Readonly<Record<string, string>> = { exclusive: "one worker", mps: "MPS", time: "by time" };
const COLUMNS: readonly Metric[] = ["compute", "memory", "temperature", "power"];

export function Gpus({ node, gpus, chosen }: { node: string; gpus: Readonly<Record<string, Gpu>>; chosen: string }) {
  const entries = Object.entries(gpus);
  if (entries.length === 0) {
    return (
      <Panel title="GPUs">
        <Empty title="This node has no GPU." />
      </Panel>
    );
  }
  return (
    <Panel title="GPUs" note="choose one to see its history">
      <Scroll label="GPUs">
        <table>
          <thead>
            <tr>
              <th>GPU</th>
              <th>Health</th>
              <th class="number">Compute</th>
              <th class="number">Memory used</th>
              <th class="number">Temperature</th>
              <th class="number">Power</th>
              <th>Shared</th>
              <th>Functions, and their shares</th>
            </tr>
          </thead>
          <tbody>
            {entries.map(([uuid, gpu]) => (
              <tr key={uuid} aria-selected={uuid === chosen}>
                <td>
                  <Link to={`/nodes/${node}`} query={{ gpu: uuid === chosen ? "" : uuid }}>
                    {gpu.kind.replace(/^NVIDIA /, "")}
                  </Link>
                  <span class="dim mono block">{shortUuid(uuid)}</span>
                  {gpu.parent ? <span class="dim block">MIG instance of {shortUuid(gpu.parent)}</span> : null}
                  {gpu.foreign_bytes ? <span class="dim block">{bytes(gpu.foreign_bytes)} held by other programs</span> : null}
                </td>
                <td class={gpu.health_reason || gpu.score.reasons.length ? "reason" : ""}>
                  <Badge tone={TONES[gpu.health]}>{gpu.health}</Badge> <Advice score={gpu.score} />
                  {gpu.health_reason ? <span class="block">{visible(gpu.health_reason)}</span> : null}
                  {gpu.score.reasons
                    .filter((each) => !gpu.health_reason || !each.includes(gpu.health_reason))
                    .map((each) => (
                      <span key={each} class="dim block">
                        {visible(each)}
                      </span>
                    ))}
                </td>
                {COLUMNS.map((metric) => (
                  <Cell key={metric} metric={metric} gpu={gpu} />
                ))}
                <td>{gpu.mode === null ? <span class="dim">free</span> : (MODES[gpu.mode] ?? gpu.mode)}</td>
                <td class="reason">
                  {Object.entries(gpu.workers).map(([worker, held]) => (
                    <Held key={worker} held={held} mode={gpu.mode} />
                  ))}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

const LIMITS: Readonly<Record<Metric, (gpu: Gpu) => string>> = {
  compute: () => "",
  memory: (gpu) => `of ${bytes(gpu.memory_bytes)}`,
  temperature: (gpu) => (gpu.temperature_c === null || gpu.temperature_limit_c === null ? "" : `of ${gpu.temperature_limit_c} °C`),
  power: (gpu) => (gpu.power_w === null || gpu.power_limit_w === null ? "" : `of ${number(gpu.power_limit_w)} W`),
};

function Cell({ metric, gpu }: { metric: Metric; gpu: Gpu }) {
  const { share, text } = heatOf(metric, gpu);
  return (
    <td class={`number ${heatClass(share)}`}>
      {text}
      <span class="dim block">{LIMITS[metric](gpu)}</span>
    </td>
  );
}

function Held({ held, mode }: { held: GpuShare; mode: string | null }) {
  const parts = [
    mode === "mps" ? `at most ${held.sm_percent} % of compute` : "",
    memoryOf(held),
    held.busy === null ? "" : `${percent(held.busy)} busy`,
    held.charged < 1 && Math.abs(held.charged - held.sm_percent / 100) > 0.001 ? `charged ${percent(held.charged)}` : "",
    held.parked ? "parked" : "",
  ].filter(Boolean);
  return (
    <span class="block">
      <Link to={`/functions/${held.function}`}>{held.function}</Link>
      {parts.length ? <span class="dim">: {parts.join(", ")}</span> : null}
    </span>
  );
}

function memoryOf(held: GpuShare): string {
  if (held.memory_bytes === null) {
    return held.vram_bytes ? `at most ${bytes(held.vram_bytes)}` : "";
  }
  return held.vram_bytes ? `${bytes(held.memory_bytes)} of ${bytes(held.vram_bytes)}` : bytes(held.memory_bytes);
}
