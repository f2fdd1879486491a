/** The body of a response of a function: its type is the choice of the user, so it is shown as text or offered as a file. */

const MAX_TEXT = 200_000;

export interface ShownBody {
  readonly contentType: string;
  /** null: it is no text, or too long. */
  readonly text: string | null;
  readonly blob: Blob;
}

export async function shownBody(response: Response): Promise<ShownBody> {
  const contentType = response.headers.get("content-type") ?? "";
  const blob = await response.blob();
  const isText = /^(?:text\/|application\/(?:.*\+)?json|application\/xml)/.test(contentType);
  if (!isText || blob.size > MAX_TEXT) {
    return { contentType, text: null, blob };
  }
  return { contentType, text: pretty(contentType, await blob.text()), blob };
}

function pretty(contentType: string, text: string): string {
  try {
    return contentType.includes("json") ? JSON.stringify(JSON.parse(text), null, 2) : text;
  } catch {
    return text;
  }
}
