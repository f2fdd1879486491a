/** The sign-in at an identity provider. Pure. */

const OUTCOMES = new Map(
  Object.entries({
    denied: "The identity provider has not confirmed the login.",
    expired: "The login took longer than 10 minutes, or began in another browser. Sign in again.",
    failed: "The gateway did not accept the login. Its log says why.",
    "no-role": "Your groups have no role at this gateway. Ask its administrator for one.",
    unavailable: "The identity provider cannot be reached from the gateway. Try again in a few seconds.",
  }),
);

/** Why a login has failed, from the fragment of the address; "" for another fragment. */
export function failureOf(fragment: string): string {
  return OUTCOMES.get(new URLSearchParams(fragment.slice(1)).get("login") ?? "") ?? "";
}

/** The host of a provider, for the button. */
export function hostOf(issuer: string): string {
  try {
    return new URL(issuer).host;
  } catch {
    return issuer;
  }
}
