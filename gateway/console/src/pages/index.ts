/** The pages of the console. To add one, write its component, and add a line here (docs/console.md, "Add a page"). */

import type { ComponentType } from "preact";
import { matched, type Address, type Query } from "../core/route";

export interface PageProps {
  readonly parameters: Query;
  readonly query: Query;
}

export interface Page {
  readonly pattern: string;
  /** The scope without which the API has nothing for this page. */
  readonly needs: "read" | "";
  /** The label in the navigation. A page without one is reached by links. */
  readonly label?: string;
  readonly title: (parameters: Query) => string;
  readonly load: () => Promise<{ readonly default: ComponentType<PageProps> }>;
}

export const PAGES: readonly Page[] = [
  {
    pattern: "/",
    needs: "read",
    label: "Overview",
    title: () => "Overview",
    load: () => import("./overview/overview"),
  },
  {
    pattern: "/functions",
    needs: "read",
    label: "Functions",
    title: () => "Functions",
    load: () => import("./functions/functions"),
  },
  {
    pattern: "/functions/*name",
    needs: "read",
    title: ({ name }) => name ?? "",
    load: () => import("./function/function"),
  },
  {
    pattern: "/calls",
    needs: "read",
    label: "Calls",
    title: () => "Calls",
    load: () => import("./calls/calls"),
  },
  {
    pattern: "/nodes",
    needs: "read",
    label: "Nodes",
    title: () => "Nodes",
    load: () => import("./nodes/nodes"),
  },
  {
    pattern: "/calls/:id",
    needs: "",
    title: ({ id }) => `Call ${id ?? ""}`,
    load: () => import("./call/call"),
  },
];

export function pageAt(address: Address): { page: Page; parameters: Query } | null {
  for (const page of PAGES) {
    const parameters = matched(page.pattern, address.path);
    if (parameters !== null) {
      return { page, parameters };
    }
  }
  return null;
}
