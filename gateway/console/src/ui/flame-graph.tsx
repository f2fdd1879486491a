/** A profile as a flame graph, the callers above. A frame that is chosen gets the whole width; the arrow keys lead from frame to frame. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { percent, visible } from "../core/format";
import { boxesOf, colorOf, isOfPlatform, neighbour, textOf, type Node } from "../core/profile/flame";

const COLORS = 6;
const ROW_PX = 24;
const LEAST_TEXT = 0.02; // of the width

interface FlameGraphProps {
  readonly label: string;
  readonly root: Node;
  /** Frames whose name or file contains it are marked. */
  readonly search: string;
  readonly format: (value: number) => string;
}

export function FlameGraph({ label, root, search, format }: FlameGraphProps) {
  const [chosen, choose] = useState(root);
  const [current, setCurrent] = useState(root);
  const tree = useRef<HTMLDivElement>(null);
  useEffect(() => {
    choose(root);
    setCurrent(root);
  }, [root]);
  const boxes = useMemo(() => boxesOf(chosen), [chosen]);
  const needle = search.trim().toLowerCase();
  function press(event: KeyboardEvent): void {
    if (event.key === "Escape") {
      choose(root);
      return;
    }
    const next = neighbour(current, event.key);
    if (next) {
      event.preventDefault();
      setCurrent(next);
      if (!boxes.some(({ node }) => node === next)) {
        choose(next);
      }
      requestAnimationFrame(() => tree.current?.querySelector<HTMLElement>('[tabindex="0"]')?.focus());
    }
  }
  const isShown = boxes.some(({ node }) => node === current);
  return (
    <>
      <div class="flame" role="tree" aria-label={label} ref={tree} onKeyDown={press}>
        <div class="flame-rows" style={{ height: `${ROW_PX * (1 + Math.max(...boxes.map(({ node }) => node.depth)))}px` }}>
          {boxes.map(({ node, left, width }) => {
            const name = visible(textOf(node.frame));
            const words = `${name}: ${format(node.total)}, ${percent(share(node, root))} of all; itself ${format(node.own)}`;
            const isFound = needle !== "" && name.toLowerCase().includes(needle);
            const tone = node === root || isOfPlatform(node.frame) ? "flame-plain" : `flame-${colorOf(node.frame, COLORS)}`;
            return (
              <button
                key={`${node.depth} ${left}`}
                type="button"
                role="treeitem"
                aria-level={node.depth + 1}
                aria-selected={node === chosen}
                aria-label={words}
                title={words}
                tabIndex={node === current || (!isShown && node === chosen) ? 0 : -1}
                class={`flame-box ${tone} ${isFound ? "found" : ""} ${node.depth < chosen.depth ? "above" : ""}`}
                style={{ left: `${100 * left}%`, width: `${100 * width}%`, top: `${ROW_PX * node.depth}px` }}
                onClick={() => {
                  choose(node);
                  setCurrent(node);
                }}
              >
                {width >= LEAST_TEXT ? name : ""}
              </button>
            );
          })}
        </div>
      </div>
      <p class="dim" role="status">
        {visible(textOf(chosen.frame))}: {format(chosen.total)}, {percent(share(chosen, root))} of all; itself {format(chosen.own)}.{" "}
        {chosen === root ? (
          "Choose a frame to enlarge it."
        ) : (
          <button type="button" onClick={() => choose(root)}>
            Show all
          </button>
        )}
      </p>
    </>
  );
}

function share(node: Node, root: Node): number {
  return root.total ? node.total / root.total : 0;
}
