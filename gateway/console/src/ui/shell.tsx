/** The frame around each page: navigation, who is signed in, theme. `?kiosk` leaves it out, for a screen on a wall. */

import type { ComponentChildren } from "preact";
import { useContext, useEffect, useRef, useState } from "preact/hooks";
import { PrincipalContext } from "../api/principal";
import { signOut } from "../api/request";
import type { Address } from "../core/route";
import { isFor, PAGES } from "../pages";
import { Link } from "./router";
import { setTheme, theme, type Theme } from "./theme";

export function Shell({ address, children }: { address: Address; children: ComponentChildren }) {
  const principal = useContext(PrincipalContext);
  const pages = PAGES.filter((page) => page.label && isFor(page, principal.scopes));
  const nav = useRef<HTMLUListElement>(null);
  useEffect(() => nav.current?.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [address.path]);
  if ("kiosk" in address.query) {
    return (
      <main class="kiosk" id="content">
        {children}
      </main>
    );
  }
  return (
    <div class="frame">
      <a class="skip" href="#content">
        Skip to the content
      </a>
      <nav class="side" aria-label="Pages">
        <Link to="/" class="brand">
          gpufn
        </Link>
        <ul ref={nav}>
          {pages.map((page, index) => (
            <li key={page.pattern}>
              {page.section && page.section !== pages[index - 1]?.section ? <span class="section">{page.section}</span> : null}
              <Link to={page.pattern} current={isWithin(page.pattern, address.path)}>
                {page.label}
              </Link>
            </li>
          ))}
        </ul>
        <div class="who">
          {principal.id ? (
            <>
              <span class="dim" title={principal.scopes.join(", ")}>
                {principal.name || principal.id}
              </span>
              <button type="button" class="plain" onClick={() => void signOut()}>
                Sign out
              </button>
            </>
          ) : (
            <span class="dim">this machine, no keys</span>
          )}
          <ThemeChoice />
        </div>
      </nav>
      <main id="content" tabIndex={-1}>
        {children}
      </main>
    </div>
  );
}

function isWithin(pattern: string, path: string): boolean {
  return pattern === "/" ? path === "/" : path === pattern || path.startsWith(`${pattern}/`);
}

function ThemeChoice() {
  const [chosen, setChosen] = useState<Theme>(theme);
  return (
    <label class="theme">
      <span class="hidden">Theme</span>
      <select
        value={chosen}
        onChange={(event) => {
          const next = event.currentTarget.value as Theme;
          setTheme(next);
          setChosen(next);
        }}
      >
        <option value="system">System theme</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </label>
  );
}
