import { ticksOf } from "../core/timeline";
import { Scroll } from "./scroll";

const WIDTH = 900;
const HEIGHT = 170;
const LEFT = 76;
const TOP = 8;
const BOTTOM = 24;
const MOST_LABELS = 10;

interface DayBarsProps {
  readonly label: string;
  readonly names: readonly string[];
  readonly days: readonly { readonly day: string; readonly values: readonly number[] }[];
  readonly format: (value: number) => string;
  /** One bar per day, with its values above each other. */
  readonly isStacked?: boolean;
}

/** A bar of each value of each day. The table below has the numbers. */
export function DayBars({ label, names, days, format, isStacked = false }: DayBarsProps) {
  const highest = Math.max(...days.flatMap(({ values }) => (isStacked ? [sum(values)] : values)));
  const top = highest > 0 ? highest * 1.1 : 1;
  const slot = (WIDTH - LEFT) / days.length;
  const width = Math.max(0.8, (slot * 0.8) / (isStacked ? 1 : names.length));
  const every = Math.ceil(days.length / MOST_LABELS);
  const y = (value: number): number => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
  return (
    <figure class="plot">
      <Scroll label={label} fromEnd>
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label}>
        {ticksOf(top).map((tick) => (
          <g key={tick}>
            <line class="grid" x1={LEFT} x2={WIDTH} y1={y(tick)} y2={y(tick)} />
            <text x={LEFT - 6} y={y(tick) + 4} text-anchor="end">
              {highest > 0 || tick === 0 ? format(tick) : ""}
            </text>
          </g>
        ))}
        {days.map(({ day, values }, index) => (
          <g key={day}>
            {values.map((value, place) => {
              const below = isStacked ? sum(values.slice(0, place)) : 0;
              const left = LEFT + index * slot + slot * 0.1 + (isStacked ? 0 : place * width);
              return (
                <rect key={place} class={`bar-${place}`} x={left} width={width} y={y(below + value)} height={Math.max(0, y(below) - y(below + value))}>
                  <title>{`${day}: ${names[place] ?? ""} ${format(value)}`}</title>
                </rect>
              );
            })}
            {(days.length - 1 - index) % every === 0 ? (
              <text x={LEFT + (index + 0.5) * slot} y={HEIGHT - BOTTOM + 16} text-anchor="middle">
                {day.slice(5)}
              </text>
            ) : null}
          </g>
        ))}
        </svg>
      </Scroll>
      <figcaption>
        {names.map((name, place) => (
          <span key={name} class={`key bar-key-${place}`}>
            {name}
          </span>
        ))}
      </figcaption>
    </figure>
  );
}

function sum(values: readonly number[]): number {
  return values.reduce((total, each) => total + each, 0);
}
