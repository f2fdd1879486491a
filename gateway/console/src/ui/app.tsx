/** The console: sign-in, or the page at the address. */

import type { ComponentType } from "preact";
import { useEffect, useState } from "preact/hooks";
import { PrincipalContext, type Principal } from "../api/principal";
import { get, Problem, SIGNED_OUT, signIn } from "../api/request";
import { pageAt, type Page, type PageProps } from "../pages";
import type { Address, Query } from "../core/route";
import { Empty, ErrorBox, Loading } from "./parts";
import { go, Link, useAddress } from "./router";
import { Shell } from "./shell";
import { SignIn } from "./sign-in";

type Session = { readonly principal: Principal } | { readonly problem: unknown } | null;

export function App() {
  const address = useAddress();
  const [session, setSession] = useState<Session>(null);
  useEffect(() => {
    void start().then(setSession);
    const onSignedOut = (): void => setSession({ problem: new Problem(401, "unauthorized", "The session has ended.") });
    addEventListener(SIGNED_OUT, onSignedOut);
    return () => removeEventListener(SIGNED_OUT, onSignedOut);
  }, []);
  if (session === null) {
    return <Loading what="the console" />;
  }
  if ("problem" in session) {
    const { problem } = session;
    const isSignedOut = problem instanceof Problem && problem.status === 401;
    return isSignedOut ? <SignIn /> : <Unreachable problem={problem} retry={() => void start().then(setSession)} />;
  }
  return (
    <PrincipalContext.Provider value={session.principal}>
      <Shell address={address}>
        <PageAt address={address} />
      </Shell>
    </PrincipalContext.Provider>
  );
}

async function start(): Promise<Session> {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
  try {
    if (ticket) {
      history.replaceState(null, "", location.pathname + location.search);
      await signIn({ ticket });
      location.reload();
      return null;
    }
    return { principal: await get<Principal>("/v1/auth/me") };
  } catch (problem) {
    return { problem };
  }
}

const RETRY_MS = 2000;

function Unreachable({ problem, retry }: { problem: unknown; retry: () => void }) {
  useEffect(() => {
    const timer = setInterval(retry, RETRY_MS);
    return () => clearInterval(timer);
  }, []);
  return (
    <main class="sign-in" id="content">
      <h1>gpufn</h1>
      <ErrorBox error={problem} />
    </main>
  );
}

interface Loaded {
  readonly page: Page;
  readonly component: ComponentType<PageProps> | null;
  readonly problem: unknown;
}

function PageAt({ address }: { address: Address }) {
  const found = pageAt(address);
  const [loaded, setLoaded] = useState<Loaded | null>(null);
  const page = found?.page ?? null;
  useEffect(() => {
    if (page !== null) {
      page.load().then(
        (module) => setLoaded({ page, component: module.default, problem: null }),
        (problem: unknown) => setLoaded({ page, component: null, problem }),
      );
    }
  }, [page]);
  useTitle(found);
  if (found === null) {
    return (
      <Empty title="There is no page at this address.">
        <Link to="/">Go to the overview</Link>
      </Empty>
    );
  }
  if (loaded === null || loaded.page !== page) {
    return null; // the part of the script arrives within milliseconds
  }
  if (loaded.component === null) {
    return <ErrorBox error={loaded.problem} />;
  }
  const Shown = loaded.component;
  return <Shown key={JSON.stringify(found.parameters)} parameters={found.parameters} query={address.query} />;
}

function useTitle(found: { page: Page; parameters: Query } | null): void {
  const title = found === null ? "Not found" : found.page.title(found.parameters);
  useEffect(() => {
    document.title = `${title} · gpufn`;
  }, [title]);
}

/** Open the search of functions with "/", as in many consoles. */
addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) {
    const search = document.querySelector<HTMLInputElement>('input[type="search"]');
    event.preventDefault();
    if (search) {
      search.focus();
    } else {
      go("/functions");
    }
  }
});
