/** Server-sent events, parsed from the text of a response as it arrives. Pure. */

export interface ServerEvent {
  readonly name: string;
  readonly data: string;
}

/** Return the complete events in `text`, and the rest, which belongs to the next one. */
export function parsedEvents(text: string): { events: ServerEvent[]; rest: string } {
  const blocks = text.split("\n\n");
  const rest = blocks.pop() ?? "";
  return { events: blocks.map(parsedEvent).filter((event) => event.data !== ""), rest };
}

function parsedEvent(block: string): ServerEvent {
  let name = "message";
  const data: string[] = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) {
      name = line.slice(6).trim();
    } else if (line.startsWith("data:")) {
      data.push(line.slice(5).replace(/^ /, ""));
    }
  }
  return { name, data: data.join("\n") };
}
