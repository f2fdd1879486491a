import { duration } from "../../core/format";
import { Scroll } from "../../ui/scroll";
import { latencyPlot, type Candidate } from "../../core/operate/report";

const WIDTH = 900;
const HEIGHT = 240;
const LEFT = 70;
const RIGHT = 16;
const TOP = 12;
const BOTTOM = 30;
const PERCENTILES = [0, 0.25, 0.5, 0.75, 0.9, 0.99];

const x = (share: number): number => LEFT + share * (WIDTH - LEFT - RIGHT);
const y = (height: number): number => HEIGHT - BOTTOM - height * (HEIGHT - TOP - BOTTOM);

/** The time of a run over its percentile, for each candidate. */
export function LatencyPlotView({ candidates }: { candidates: readonly Candidate[] }) {
  const plot = latencyPlot(candidates);
  if (plot === null) {
    return null;
  }
  return (
    <figure class="plot">
      <Scroll label="Time of a run">
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="Time of a run over its percentile, for each candidate">
        {plot.ticks.map(([seconds, height]) => (
          <g key={seconds}>
            <line class="grid" x1={LEFT} x2={WIDTH - RIGHT} y1={y(height)} y2={y(height)} />
            <text x={LEFT - 6} y={y(height) + 4} text-anchor="end">
              {duration(seconds)}
            </text>
          </g>
        ))}
        {PERCENTILES.map((share) => (
          <text key={share} x={x(share)} y={HEIGHT - BOTTOM + 18} text-anchor="middle">
            p{100 * share}
          </text>
        ))}
        {plot.curves.map((curve, index) => (
          <polyline key={index} class={`curve curve-${index % 6}`} points={curve.points.map(([share, height]) => `${x(share).toFixed(1)},${y(height).toFixed(1)}`).join(" ")} />
        ))}
        </svg>
      </Scroll>
      <figcaption>
        {plot.curves.map((curve, index) => (
          <span key={index} class={`key curve-key-${index % 6}`}>
            {curve.label}
          </span>
        ))}
      </figcaption>
    </figure>
  );
}
