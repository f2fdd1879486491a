/** The pages of the console. To add one, write its component, and add a line here (docs/console.md, "Add a page"). */

import type { ComponentType } from "preact";
import { matched, type Address, type Query } from "../core/route";
import { covers, coversEverything } from "../core/scopes";

export interface PageProps {
  readonly parameters: Query;
  readonly query: Query;
}

export interface Page {
  readonly pattern: string;
  /** The scope without which the API has nothing for this page. */
  readonly needs: "read" | "read everything" | "admin" | "";
  /** The heading above its label in the navigation. */
  readonly section?: "Platform" | "Data" | "Access";
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
    pattern: "/maps",
    needs: "read",
    label: "Maps",
    title: () => "Maps",
    load: () => import("./maps/maps"),
  },
  {
    pattern: "/maps/:id",
    needs: "",
    title: ({ id }) => `Map ${id ?? ""}`,
    load: () => import("./map/map"),
  },
  {
    pattern: "/dead-letters",
    needs: "read",
    label: "Dead letters",
    title: () => "Dead letters",
    load: () => import("./dead-letters/dead-letters"),
  },
  {
    pattern: "/schedules",
    needs: "read",
    label: "Schedules",
    title: () => "Schedules",
    load: () => import("./schedules/schedules"),
  },
  {
    pattern: "/nodes",
    needs: "read everything",
    label: "Nodes",
    section: "Platform",
    title: () => "Nodes",
    load: () => import("./nodes/nodes"),
  },
  {
    pattern: "/nodes/:name",
    needs: "read everything",
    title: ({ name }) => name ?? "",
    load: () => import("./node/node"),
  },
  {
    pattern: "/builds",
    needs: "read",
    label: "Builds",
    section: "Platform",
    title: () => "Builds",
    load: () => import("./builds/builds"),
  },
  {
    pattern: "/builds/:id",
    needs: "read",
    title: ({ id }) => `Build ${id ?? ""}`,
    load: () => import("./build/build"),
  },
  {
    pattern: "/events",
    needs: "read",
    label: "Events",
    section: "Platform",
    title: () => "Events",
    load: () => import("./events/events"),
  },
  {
    pattern: "/usage",
    needs: "read",
    label: "Usage",
    section: "Platform",
    title: () => "Usage",
    load: () => import("./usage/usage"),
  },
  {
    pattern: "/costs",
    needs: "read",
    label: "Costs",
    section: "Platform",
    title: () => "Costs",
    load: () => import("./costs/costs"),
  },
  {
    pattern: "/secrets",
    needs: "read",
    label: "Secrets",
    section: "Data",
    title: () => "Secrets",
    load: () => import("./secrets/secrets"),
  },
  {
    pattern: "/volumes",
    needs: "read",
    label: "Volumes",
    section: "Data",
    title: () => "Volumes",
    load: () => import("./volumes/volumes"),
  },
  {
    pattern: "/volumes/*name",
    needs: "read",
    title: ({ name }) => name ?? "",
    load: () => import("./volume/volume"),
  },
  {
    pattern: "/queues",
    needs: "read",
    label: "Queues and dicts",
    section: "Data",
    title: () => "Queues and dicts",
    load: () => import("./queues/queues"),
  },
  {
    pattern: "/keys",
    needs: "admin",
    label: "API keys",
    section: "Access",
    title: () => "API keys",
    load: () => import("./keys/keys"),
  },
  {
    pattern: "/users",
    needs: "admin",
    label: "Users",
    section: "Access",
    title: () => "Users",
    load: () => import("./users/users"),
  },
  {
    pattern: "/teams",
    needs: "read",
    label: "Teams",
    section: "Access",
    title: () => "Teams",
    load: () => import("./teams/teams"),
  },
  {
    pattern: "/signing",
    needs: "read everything",
    label: "Signing",
    section: "Access",
    title: () => "Signing",
    load: () => import("./signing/signing"),
  },
  {
    pattern: "/audit",
    needs: "admin",
    label: "Audit log",
    section: "Access",
    title: () => "Audit log",
    load: () => import("./audit/audit"),
  },
  {
    pattern: "/calls/:id",
    needs: "",
    title: ({ id }) => `Call ${id ?? ""}`,
    load: () => import("./call/call"),
  },
];

/** Whether the API has something for the page for these scopes. */
export function isFor(page: Page, scopes: readonly string[]): boolean {
  switch (page.needs) {
    case "":
      return true;
    case "read everything":
      return coversEverything(scopes, "read");
    default:
      return covers(scopes, page.needs);
  }
}

export function pageAt(address: Address): { page: Page; parameters: Query } | null {
  for (const page of PAGES) {
    const parameters = matched(page.pattern, address.path);
    if (parameters !== null) {
      return { page, parameters };
    }
  }
  return null;
}
