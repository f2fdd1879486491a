/** Links and the address of the page. A link is an ordinary `<a>`: it opens in a new tab, and has an address to copy. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { addressOf, BASE, href, type Address, type Query } from "../core/route";

const CHANGED = "gpufn-address";

function current(): Address {
  return addressOf(location.pathname, location.search);
}

export function go(path: string, query: Query = {}, { replace = false } = {}): void {
  const target = href(path, query);
  if (target !== location.pathname + location.search) {
    history[replace ? "replaceState" : "pushState"](null, "", target);
    dispatchEvent(new Event(CHANGED));
  }
}

/** Change some parameters of the query, and keep the page. */
export function setQuery(changes: Query): void {
  const { path, query } = current();
  go(path, { ...query, ...changes }, { replace: true });
}

export function useAddress(): Address {
  const [address, setAddress] = useState(current);
  useEffect(() => {
    const update = (): void => setAddress(current());
    addEventListener("popstate", update);
    addEventListener(CHANGED, update);
    document.addEventListener("click", onClick);
    return () => {
      removeEventListener("popstate", update);
      removeEventListener(CHANGED, update);
      document.removeEventListener("click", onClick);
    };
  }, []);
  return address;
}

function onClick(event: MouseEvent): void {
  const link = event.target instanceof Element ? event.target.closest("a") : null;
  const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  if (link === null || !isPlain || event.defaultPrevented || link.target || link.hasAttribute("download")) {
    return;
  }
  const url = new URL(link.href);
  if (url.origin === location.origin && (url.pathname === BASE || url.pathname.startsWith(`${BASE}/`)) && !url.hash) {
    event.preventDefault();
    const { path, query } = addressOf(url.pathname, url.search);
    go(path, query);
    scrollTo(0, 0);
  }
}

interface LinkProps {
  readonly to: string;
  readonly query?: Query;
  readonly children: ComponentChildren;
  readonly class?: string;
  readonly current?: boolean;
}

export function Link({ to, query = {}, children, class: name, current: isCurrent }: LinkProps) {
  return (
    <a href={href(to, query)} class={name} aria-current={isCurrent ? "page" : undefined}>
      {children}
    </a>
  );
}
