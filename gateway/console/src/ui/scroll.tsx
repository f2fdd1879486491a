/** A part of the page that may be wider than the screen. It scrolls with the keyboard too, if it has to. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface ScrollProps {
  readonly label: string;
  /** Show the end first, such as the newest day. */
  readonly fromEnd?: boolean;
  readonly children: ComponentChildren;
}

export function Scroll({ label, fromEnd = false, children }: ScrollProps) {
  const box = useRef<HTMLDivElement>(null);
  const [isWide, setWide] = useState(false);
  useEffect(() => {
    const element = box.current;
    if (element === null) {
      return undefined;
    }
    if (fromEnd) {
      element.scrollLeft = element.scrollWidth;
    }
    const sizes = new ResizeObserver(() => setWide(element.scrollWidth > element.clientWidth));
    sizes.observe(element);
    for (const child of element.children) {
      sizes.observe(child);
    }
    return () => sizes.disconnect();
  }, [fromEnd]);
  const focusable = isWide ? { tabIndex: 0, role: "region" as const, "aria-label": label } : {};
  return (
    <div class="scroll" ref={box} {...focusable}>
      {children}
    </div>
  );
}
