/** Who is signed in, and what they may do. The API checks each request: this only hides what it would refuse. */

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { covers, coversEverything } from "../core/scopes";

export interface Principal {
  /** "" if the gateway has no keys, and serves everybody on this machine. */
  readonly id: string;
  readonly name: string;
  readonly scopes: readonly string[];
  readonly expires_at: number | null;
}

export const PrincipalContext = createContext<Principal>({ id: "", name: "", scopes: [], expires_at: null });

/** Whether the signed-in principal has a verb for a function, or with no function for some. */
export function useMay(verb: "read" | "deploy" | "invoke" | "admin", functionName?: string): boolean {
  return covers(useContext(PrincipalContext).scopes, verb, functionName);
}

/** Whether the signed-in principal has a verb for what belongs to no function. */
export function useMayEverything(verb: "read" | "deploy" | "admin"): boolean {
  return coversEverything(useContext(PrincipalContext).scopes, verb);
}
