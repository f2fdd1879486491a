/** A profile as a flame graph: the stacks of a speedscope file as a tree, and its boxes on a line from 0 to 1. Pure. */

export interface Frame {
  readonly name: string;
  readonly file?: string;
  readonly line?: number;
}

/** The members of a speedscope file that the platform writes (sdk/gpufn_core/domain/profiles/stacks.py). */
export interface Speedscope {
  readonly name: string;
  readonly shared: { readonly frames: readonly Frame[] };
  readonly profiles: readonly {
    readonly unit: "seconds" | "bytes";
    readonly samples: readonly (readonly number[])[];
    readonly weights: readonly number[];
  }[];
}

export interface Node {
  readonly frame: Frame;
  readonly depth: number;
  readonly parent: Node | null;
  /** With what it called, in seconds or bytes. */
  total: number;
  own: number;
  /** The heaviest first. */
  children: Node[];
}

export interface Box {
  readonly node: Node;
  readonly left: number;
  readonly width: number;
}

export interface Top {
  readonly frame: Frame;
  readonly own: number;
  readonly total: number;
}

export const ROOT = "all";
const MOST_BOXES = 2_000;
const LEAST_WIDTH = 0.0008; // less than a pixel

/** The tree of all stacks. Lines of a function count together, except those of memory. */
export function treeOf(file: Speedscope): Node {
  const root: Node = { frame: { name: ROOT }, depth: 0, parent: null, total: 0, own: 0, children: [] };
  const known = new Map<Node, Map<string, Node>>();
  const profile = file.profiles[0];
  const byLine = profile?.unit === "bytes";
  for (const [index, stack] of (profile?.samples ?? []).entries()) {
    const weight = profile?.weights[index] ?? 0;
    let node = root;
    node.total += weight;
    for (const number of stack) {
      const frame = file.shared.frames[number] ?? { name: "?" };
      node = childOf(node, byLine ? frame : withoutLine(frame), known);
      node.total += weight;
    }
    node.own += weight;
  }
  for (const node of known.keys()) {
    node.children.sort((a, b) => b.total - a.total || a.frame.name.localeCompare(b.frame.name));
  }
  return root;
}

function childOf(parent: Node, frame: Frame, known: Map<Node, Map<string, Node>>): Node {
  const children = known.get(parent) ?? new Map<string, Node>();
  known.set(parent, children);
  const key = textOf(frame);
  const found = children.get(key);
  if (found) {
    return found;
  }
  const child: Node = { frame, depth: parent.depth + 1, parent, total: 0, own: 0, children: [] };
  children.set(key, child);
  parent.children.push(child);
  return child;
}

function withoutLine(frame: Frame): Frame {
  return frame.file === undefined ? { name: frame.name } : { name: frame.name, file: frame.file };
}

/** "name (file:line)", as the command line writes it. */
export function textOf(frame: Frame): string {
  const line = frame.line === undefined ? "" : `:${frame.line}`;
  return frame.file === undefined ? frame.name : `${frame.name} (${frame.file}${line})`;
}

/** The boxes of a node and of what is above and below it, each row from left to right. Boxes that are too narrow to see are left out. */
export function boxesOf(chosen: Node): Box[] {
  const boxes: Box[] = [];
  for (let node = chosen.parent; node !== null; node = node.parent) {
    boxes.unshift({ node, left: 0, width: 1 });
  }
  let row: Box[] = [{ node: chosen, left: 0, width: 1 }];
  while (row.length > 0 && boxes.length < MOST_BOXES) {
    boxes.push(...row.slice(0, MOST_BOXES - boxes.length));
    row = row.flatMap(below);
  }
  return boxes;
}

function below({ node, left, width }: Box): Box[] {
  let at = left;
  const boxes: Box[] = [];
  for (const child of node.children) {
    const part = node.total > 0 ? (width * child.total) / node.total : 0;
    if (part >= LEAST_WIDTH) {
      boxes.push({ node: child, left: at, width: part });
    }
    at += part;
  }
  return boxes;
}

/** The frames that have most themselves. A frame counts once in a stack that has it several times. */
export function topOf(root: Node, most: number): Top[] {
  const found = new Map<string, { frame: Frame; own: number; total: number }>();
  const add = (node: Node, above: ReadonlySet<string>): void => {
    const key = textOf(node.frame);
    const entry = found.get(key) ?? { frame: node.frame, own: 0, total: 0 };
    found.set(key, entry);
    entry.own += node.own;
    entry.total += above.has(key) ? 0 : node.total;
    const here = node.children.length ? new Set(above).add(key) : above;
    node.children.forEach((child) => add(child, here));
  };
  root.children.forEach((child) => add(child, new Set()));
  return [...found.values()].sort((a, b) => b.own - a.own || b.total - a.total).slice(0, most);
}

/** Whether a frame is of the platform or of the start of Python, and not of the function. */
export function isOfPlatform(frame: Frame): boolean {
  return /^(?:gpufn_|<frozen )/.test(frame.file ?? "");
}

/** The number of one of `count` colours: frames of a file have the same. */
export function colorOf(frame: Frame, count: number): number {
  let hash = 0;
  for (const character of frame.file ?? frame.name) {
    hash = (hash * 31 + (character.codePointAt(0) ?? 0)) % 65_521;
  }
  return hash % count;
}

/** The node that a key leads to: up to the caller, down to the heaviest call, or to a neighbour. */
export function neighbour(node: Node, key: string): Node | null {
  const siblings = node.parent?.children ?? [];
  const place = siblings.indexOf(node);
  switch (key) {
    case "ArrowUp":
      return node.parent;
    case "ArrowDown":
      return node.children[0] ?? null;
    case "ArrowLeft":
      return siblings[place - 1] ?? null;
    case "ArrowRight":
      return siblings[place + 1] ?? null;
    default:
      return null;
  }
}
