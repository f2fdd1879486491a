/** A chart of values over time, with units at its axis. A gap in the data is a gap in the line. */

import uPlot from "uplot";
import { useEffect, useRef } from "preact/hooks";

export interface Series {
  readonly label: string;
  /** A colour of the theme, such as "--accent". */
  readonly color: string;
}

const FEW = 30;
const SHORTEST_S = 60; // of the time axis

interface ChartProps {
  readonly label: string;
  readonly series: readonly Series[];
  /** Unix seconds, then the values of each series. */
  readonly data: readonly [readonly number[], ...(readonly (number | null)[])[]];
  readonly format: (value: number) => string;
  readonly height?: number;
}

export function Chart({ label, series, data, format, height = 160 }: ChartProps) {
  const container = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  useEffect(() => {
    const element = container.current;
    if (element === null) {
      return undefined;
    }
    const draw = (): void => {
      plot.current?.destroy();
      plot.current = new uPlot(options(series, format, element.clientWidth, height), copied(data), element);
    };
    draw();
    const sizes = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height }));
    sizes.observe(element);
    addEventListener("gpufn-theme", draw);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    return () => {
      sizes.disconnect();
      removeEventListener("gpufn-theme", draw);
      dark.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [label, height]);
  useEffect(() => plot.current?.setData(copied(data)), [data]);
  return <div class="chart" ref={container} role="img" aria-label={label} />;
}

function copied(data: ChartProps["data"]): uPlot.AlignedData {
  return data.map((values) => [...values]) as uPlot.AlignedData;
}

function options(series: readonly Series[], format: (value: number) => string, width: number, height: number): uPlot.Options {
  const axis: uPlot.Axis = {
    stroke: colorOf("--dim"),
    grid: { stroke: colorOf("--line"), width: 1 },
    ticks: { stroke: colorOf("--line"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height,
    padding: [8, 20, 0, 0],
    legend: { live: true },
    cursor: { points: { size: 6 } },
    scales: { x: { range: (_, min, max) => [Math.min(min, max - SHORTEST_S), max] }, y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] } },
    axes: [
      { ...axis, size: 26, values: (_, ticks, __, ___, step) => ticks.map((at) => timeAt(at, step)) },
      { ...axis, size: 64, values: (_, ticks) => ticks.map(format) },
    ],
    series: [
      { label: "", value: (_, at: number | null) => (at === null ? "now" : new Date(at * 1000).toLocaleTimeString(undefined, { hour12: false })) },
      ...series.map((each) => ({
        label: each.label,
        stroke: colorOf(each.color),
        width: 1.5,
        points: { show: hasFewValues, size: 4 },
        value: (plot: uPlot, value: number | null, index: number) => shown(value ?? plot.data[index]?.at(-1), format),
      })),
    ],
  };
}

/** The time of a tick in the zone of the viewer, as exact as the distance of the ticks. */
function timeAt(at: number, stepS: number): string {
  const date = new Date(at * 1000);
  if (stepS >= 86_400) {
    return date.toLocaleDateString(undefined, { day: "numeric", month: "short" });
  }
  const seconds = stepS < 60 ? ({ second: "2-digit" } as const) : {};
  return date.toLocaleTimeString(undefined, { hour12: false, hour: "2-digit", minute: "2-digit", ...seconds });
}

/** A value between two gaps has no line: few values are drawn as points too. */
function hasFewValues(plot: uPlot, index: number): boolean {
  return (plot.data[index] ?? []).filter((value) => value !== null).length <= FEW;
}

function shown(value: number | null | undefined, format: (value: number) => string): string {
  return value === null || value === undefined ? "–" : format(value);
}

/** The value of a colour in the theme that is shown. Canvas needs it: it knows no variables. */
function colorOf(variable: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}
