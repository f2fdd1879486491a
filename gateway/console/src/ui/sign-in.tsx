/** Sign-in at the identity provider, or with an API key or a token. `gpufn console` signs in by a ticket in the address. */

import { useState } from "preact/hooks";
import { goToLogin, pageToken, signIn } from "../api/request";
import { useResource } from "../api/resource";
import { failureOf, hostOf } from "../core/login";
import { visible } from "../core/format";
import { ErrorBox } from "./parts";

export function SignIn() {
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const { data } = useResource<{ provider: { issuer: string } | null }>(pageToken ? "/v1/auth" : "");
  if (!pageToken) {
    return <NotSecure />;
  }
  const failure = failureOf(location.hash);
  async function logIn(): Promise<void> {
    setBusy(true);
    try {
      await goToLogin();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }
  async function submit(event: SubmitEvent): Promise<void> {
    event.preventDefault();
    const key = new FormData(event.currentTarget as HTMLFormElement).get("key");
    setBusy(true);
    try {
      await signIn({ key: String(key) });
      location.reload();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }
  return (
    <main class="sign-in" id="content">
      <h1>gpufn</h1>
      {failure ? (
        <p class="error" role="alert">
          {failure}
        </p>
      ) : null}
      {data?.provider ? (
        <>
          <button type="button" class="primary" disabled={isBusy} onClick={() => void logIn()}>
            Sign in with {visible(hostOf(data.provider.issuer))}
          </button>
          <p class="or">
            <span>or</span>
          </p>
        </>
      ) : null}
      <form onSubmit={(event) => void submit(event)}>
        <label for="key">API key or token</label>
        <input id="key" name="key" type="password" autoComplete="current-password" required autofocus spellcheck={false} />
        <button type="submit" class={data?.provider ? "" : "primary"} disabled={isBusy}>
          Sign in
        </button>
      </form>
      {error ? <ErrorBox error={error} /> : null}
      <p class="dim">
        On a machine where <code>gpufn</code> has a key or a login, run <code>gpufn console</code>: it signs you in. A
        session ends after 12 hours, or with its key or token.
      </p>
    </main>
  );
}

function NotSecure() {
  return (
    <main class="sign-in" id="content">
      <h1>gpufn</h1>
      <p>
        The console needs HTTPS, or an address of this machine such as <code>localhost</code>. Over plain HTTP others on
        the network could read your key.
      </p>
      <p class="dim">
        Give the gateway a certificate (<code>GPUFN_TLS_CERT</code>), or forward its port:{" "}
        <code>ssh -L 8090:localhost:8090 HOST</code>. Browsers older than 2023 lack the fields that the console needs.
      </p>
    </main>
  );
}
