/** Sign-in with an API key or a token. `gpufn console` signs in by a ticket in the address. */

import { useState } from "preact/hooks";
import { pageToken, signIn } from "../api/request";
import { ErrorBox } from "./parts";

export function SignIn() {
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  if (!pageToken) {
    return <NotSecure />;
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
      <form onSubmit={(event) => void submit(event)}>
        <label for="key">API key or token</label>
        <input id="key" name="key" type="password" autoComplete="current-password" required autofocus spellcheck={false} />
        <button type="submit" class="primary" disabled={isBusy}>
          Sign in
        </button>
      </form>
      {error ? <ErrorBox error={error} /> : null}
      <p class="dim">
        On a machine where <code>gpufn</code> has a key or a login, run <code>gpufn console</code>: it signs you in. A
        session ends after 12 hours, or with its key.
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
