import { useState } from "preact/hooks";
import { signIn } from "../../api/request";
import { Dialog } from "../../ui/dialog";

export interface NewSecret {
  readonly id: string;
  readonly key: string;
  /** The session of this page needs it: it is the first key, or the one that the session had. */
  readonly signsIn: boolean;
}

/** A new secret, once. Nothing is read from the API before it was closed: without the key, the page might be signed out. */
export function Shown({ secret, onClose }: { secret: NewSecret; onClose: () => void }) {
  const [isCopied, setCopied] = useState(false);
  return (
    <Dialog
      title={`The key ${secret.id}`}
      action={secret.signsIn ? "I have stored it: sign in with it" : "I have stored it"}
      onClose={onClose}
      onSubmit={async () => {
        if (secret.signsIn) {
          await signIn({ key: secret.key });
          location.reload();
        }
      }}
    >
      <p>Store it now: it is not shown again.</p>
      <pre class="box secret" tabIndex={0} aria-label="The key">
        {secret.key}
      </pre>
      <span>
        <button type="button" onClick={() => void navigator.clipboard.writeText(secret.key).then(() => setCopied(true))}>
          Copy
        </button>{" "}
        <span role="status">{isCopied ? "copied" : ""}</span>
      </span>
    </Dialog>
  );
}
